"""Sizes that one device computes with: tokens, heads, rows of experts, tiles of attention and grouped products."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from moe_jax.config import Config
from moe_jax.config.attention_kernels import HOPPER, Capability, Kernel, kernel_of
from moe_jax.config.grouped_products import AUTO, passes_of
from moe_jax.config.ragged_rows import sends_ragged_rows
from moe_jax.plan.work import ITEM_BYTES, attention_tile

# Rows of the smallest and the largest tile of grouped products, see models/grouped_products.py. The first of a platform
# has the largest tiles. If runs time the products, `auto` is taken for one that wins: on GPUs not the first, which was
# the slowest but one in every pass that was timed.
TILES = {
    "cpu": {"blocks": (8, 64)},
    "gpu": {
        "blocks": (64, 512),
        **dict.fromkeys(("ragged", "pallas", "hopper"), (64, 128)),
        "blackwell": (128, 128),
        "tokamax": (64, 128),
    },
    "tpu": dict.fromkeys(("ragged", "blocks", "megablox", "tokamax"), (128, 512)),
}
_EXPECTED = {"gpu": "pallas"}
_LANE_TILE = 8  # rows, see models/dispatchers/ragged.py


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Rows of a block with experts, over all microbatches."""

    sent: float  # rows sent to the experts, and back
    computed: float  # rows that this rank's experts compute, padding included
    overflow: float = 0.0  # buffer rows for those beyond the lanes of a ragged exchange
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceSizes:
    """The sizes that one device computes with."""

    item: int  # bytes of a number in the compute dtype
    sequences: float
    tokens: float
    local_tokens: float
    length: int  # tokens of a sequence on this context rank
    keys: int  # tokens of a sequence whose keys this rank stores
    tile: int | None  # tokens of a tile of queries or keys in attention; None: it has no tiles
    ring: bool  # whether keys and values travel around a ring of context ranks
    kernel: Kernel  # the attention kernel
    microbatches: int
    heads: float
    kv_heads: float
    tensor: int
    expert_tensor: int  # tensor ranks that share each expert
    rows: RowCounts

    @property
    def pairs(self) -> float:
        """The number of (query, key) pairs that are in memory at once, masked ones included."""
        if self.kernel in ("cudnn", "splash"):
            return 0.0
        return self.sequences * self.heads * (self.length * self.keys if self.tile is None else self.tile**2)


def sizes_of(
    config: Config, platform: str, mesh: Mapping[str, int], capability: Capability | None = HOPPER
) -> DeviceSizes:
    """The sizes of a config on one device; `mesh` has the number of devices along each axis, none of them -1.

    `capability` is that of the GPUs, as for `kernel_of`.
    """
    model, schedule = config.model, config.schedule
    tensor, length = mesh["tensor"], config.data.seq_len // mesh["context"]
    ring = mesh["context"] > 1 and config.exchange.context_form == "ring"
    kernel = kernel_of(config, platform, capability)
    sequences = config.train.batch_size / config.train.grad_accumulation / (mesh["data"] * mesh["expert"])
    parts = schedule.microbatches if schedule.cuts_batch else 1
    return DeviceSizes(
        item=ITEM_BYTES[config.train.compute_dtype],
        sequences=sequences,
        tokens=sequences * length,
        local_tokens=sequences * length / tensor,
        length=length,
        keys=length if ring else config.data.seq_len,
        tile=attention_tile(config, kernel, mesh["context"]),
        ring=ring,
        kernel=kernel,
        microbatches=parts,
        heads=model.num_attention_heads / tensor,
        kv_heads=model.kv_heads / tensor,
        tensor=tensor,
        expert_tensor=config.mesh.expert_tensor_ranks(mesh),
        rows=_rows(config, platform, mesh, parts, int(sequences * length / tensor)),
    )


def _rows(config: Config, platform: str, mesh: Mapping[str, int], parts: int, tokens: int) -> RowCounts:
    """Rows of a device that has `tokens` tokens of its own."""
    moe, ranks, shared_by = config.model.moe, config.mesh.expert_ranks(mesh), config.mesh.expert_tensor_ranks(mesh)
    if not moe.num_experts:
        return RowCounts(sent=0, computed=0)
    local_experts, part = moe.num_experts // ranks, tokens // parts
    if moe.gate_facts.mixes:
        sent = moe.num_experts * moe.slots_per_expert
        return RowCounts(sent=sent, computed=shared_by * sent)
    if moe.capacity_factor is None:
        own = config.data.seq_len // (mesh["tensor"] * mesh["context"])
        width = own * min(moe.top_k, local_experts)
        if config.exchange.rank_capacity_factor is not None:
            width = min(width, _rows_with_room(config.exchange.rank_capacity_factor, own * moe.top_k, ranks))
        received = shared_by * ranks * width * (part // own)
        least, most = _tile_range(config.train.grouped_product, platform)
        tile = min(max(1 << (max(received // local_experts, 1).bit_length() - 1), least), most)
        padded = -(-(received + local_experts * (tile - 1)) // tile) * tile
        # rows for copies of hot experts, which may be all of a device's rows
        kept = tokens * min(moe.top_k, config.exchange.hot_experts)
        return RowCounts(sent=parts * received / shared_by + kept, computed=parts * padded + kept)
    slots = min(tokens, _rows_with_room(moe.capacity_factor, moe.top_k * tokens, moe.num_experts))
    if not sends_ragged_rows(config, platform, shared_by):
        sent = parts * moe.num_experts * min(slots, part)
        return RowCounts(sent=sent, computed=shared_by * sent)
    most = ranks * min(slots, part)
    lane = min(-(-slots * ranks // (parts * _LANE_TILE)) * _LANE_TILE, most)
    return RowCounts(
        sent=moe.top_k * tokens,
        computed=parts * local_experts * lane,
        overflow=local_experts * (most - lane),
        ragged=True,
    )


@functools.lru_cache(maxsize=2**12)
def _rows_with_room(factor: float, rows: int, shards: int) -> int:
    """The rows of a shard times a factor, which is taken as it is written: 1.1 is eleven tenths."""
    return math.ceil(Fraction(str(factor)) * rows / shards)


@functools.cache
def _tile_range(name: str, platform: str) -> tuple[int, int]:
    """The smallest and the largest tile of a grouped product: all kernels of its passes have to take it."""
    tiles = TILES[platform]
    kernels = passes_of(_EXPECTED.get(platform, name) if name == AUTO else name)
    if kernels is None or not set(kernels) <= tiles.keys():
        return next(iter(tiles.values()))
    ranges = [tiles[kernel] for kernel in kernels]
    return max(least for least, _ in ranges), min(most for _, most in ranges)
