"""Activation memory: bytes per device that blocks store for their backward pass, and sizes that these depend on.

The stored values are those that jax stacks for the backward loop, read off the traced step:
- *all*: every value that a derivative reads. Plain steps, and scheduled ones on CPUs and GPUs.
- *least*: a minimum cut of them (`step/scheduled/min_cut_remat.py`). Scheduled steps on TPUs.
- *fused*: what XLA:GPU keeps if no loop stacks values, as it computes cheap ones again in the kernels that read them.
  Plain steps on GPUs with all blocks unrolled. Read off compiled programs (`profiling/unrolled_memory.py`).
- *chunk* (`schedule.remat`): those of *all* or *least*, but only during one backward pass of a pipeline stage.
- *dots*, *full*: the values that `schedule.remat` leaves. A plain step stores the input of a period of blocks, a
  scheduled one the input of every task: rows are not sent again.

T is the number of tokens of a context rank, of which n belong to its tensor rank; D is the model width, H·K and G·K the
widths of its query and key heads, F hidden widths, all as sharded on its tensor rank.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from moe_jax.config import Config, LatentConfig, ModelConfig
from moe_jax.config.attention_kernels import HOPPER, Capability, Kernel, kernel_of
from moe_jax.config.grouped_products import AUTO, passes_of
from moe_jax.config.layer_layout import segments
from moe_jax.config.ragged_rows import sends_ragged_rows
from moe_jax.config.step_kinds import RematUnit
from moe_jax.plan.recurrent import mean_over_blocks, recurrent_layer, recurrent_share
from moe_jax.plan.work import ITEM_BYTES, attention_tile

Mode = Literal["all", "fused", "least", "dots", "full"]
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
_FUSED_HIDDEN = 3  # values of a hidden layer, with or without a gate
_FUSED_STREAMS = 4  # results of norms, attention and MLPs, as wide as the residual stream
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


def mode_of(config: Config, platform: str) -> Mode:
    """The values that a config's blocks store."""
    if config.schedule.remat in ("dots", "full"):
        return config.schedule.remat
    if is_fused(config, platform):
        return "fused"
    return "least" if platform == "tpu" and config.step_facts.orders_tasks else "all"


def is_fused(config: Config, platform: str) -> bool:
    """Whether a step has no loop over blocks, and XLA fuses what the backward pass reads with what computes it."""
    return fuses_if_unrolled(config, platform) and config.schedule.unroll >= longest_loop(config)


def fuses_if_unrolled(config: Config, platform: str) -> bool:
    """Whether a step that unrolls all blocks takes less memory."""
    facts = config.step_facts
    if platform != "gpu" or facts.has_ticks:
        return False
    return not facts.orders_tasks or config.schedule.remat == "none"  # with remat of tasks nobody has compared it


def longest_loop(config: Config) -> int:
    """The number of iterations of the longest loop over blocks: `schedule.unroll` that unrolls all of them."""
    return max(segment.repeats for segment in segments(config.model))


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


def _mlps(model: ModelConfig, kind: str) -> list[float]:
    """Hidden widths of a block's MLPs that every token passes through; `mixer`: it has neither an MLP nor experts."""
    moe = model.moe
    widths: dict[str, list[float]] = {
        "mixer": [],
        "dense": [model.intermediate_size],
        "moe": [moe.num_shared_experts * moe.intermediate_size, model.intermediate_size * moe.dense_residual],
    }
    return [width for width in widths[kind] if width]


def stored_bytes(sizes: DeviceSizes, model: ModelConfig, kind: str, mode: Mode, remat_unit: RematUnit) -> float:
    """Bytes that a block of this kind, `dense` or `moe`, stores for its backward pass: the mean of those with attention
    and with recurrent layers, and if it is dense of those with and without an MLP.
    """
    dense = model.block_kinds.count("dense")
    if kind != "dense" or model.num_mlp_blocks == dense:
        return _mean_bytes(sizes, model, kind, mode, remat_unit)
    with_mlp = model.num_mlp_blocks / dense
    found = (1 - with_mlp) * _mean_bytes(sizes, model, "mixer", mode, remat_unit)
    return found + with_mlp * _mean_bytes(sizes, model, "dense", mode, remat_unit)


def _mean_bytes(sizes: DeviceSizes, model: ModelConfig, kind: str, mode: Mode, remat_unit: RematUnit) -> float:
    """Bytes that a block of this kind, or a mixer alone, stores on average."""
    share = recurrent_share(model)
    of_attention = _stored_bytes(sizes, model, kind, mode, remat_unit) if share < 1 else 0.0
    if not share:
        return of_attention
    without = dataclasses.replace(sizes, heads=0, kv_heads=0, tile=1, kernel="xla")
    others = dataclasses.replace(model, latent=LatentConfig())
    of_recurrent = _stored_bytes(without, others, kind, mode, remat_unit)
    if mode != "full":
        layer = recurrent_layer(model)
        numbers = layer.projected_numbers if mode == "dots" else layer.stored_numbers
        of_recurrent += sizes.item * sizes.tokens * numbers(sizes.tensor)
    return mean_over_blocks(model, of_attention, of_recurrent)


def _stored_bytes(sizes: DeviceSizes, model: ModelConfig, kind: str, mode: Mode, remat_unit: RematUnit) -> float:
    """Bytes that a block with attention stores."""
    moe, item, own, gathered = model.moe, sizes.item, sizes.local_tokens, sizes.tokens - sizes.local_tokens
    stream, stream_32 = own * model.hidden_size * item, own * model.hidden_size * 4
    query = sizes.tokens * sizes.heads * model.qk_width
    key = sizes.tokens * sizes.kv_heads * (model.qk_width + model.v_width) / 2  # and value, on average
    keys = key * sizes.keys / sizes.length  # if they are gathered, including those of other context ranks
    statistics = 4 * sizes.sequences * sizes.heads * sizes.length  # of the softmax: a maximum or a sum
    squares = 0.0 if sizes.tile else sizes.pairs  # tiles are recomputed
    copies = 0.0
    if sizes.kernel != "xla":  # one sum per query
        statistics /= 2
    if sizes.kernel == "cudnn":  # of values and attention outputs, padded to the width of keys
        extra = model.qk_width - model.v_width
        copies = item * sizes.tokens * (sizes.kv_heads * extra + sizes.heads * model.qk_width * bool(extra))
    elif sizes.kernel == "splash" and mode == "all":  # outputs in the kernel's layout, too
        copies = item * sizes.tokens * sizes.heads * model.v_width
    norms = 1 if kind == "mixer" else 2
    mlps, whole = _mlps(model, kind), sizes.tokens if gathered else 0.0  # attention and each MLP gather all tokens
    hidden_values = sizes.tokens * sum(mlps) / sizes.tensor * item
    matrices = 2 if model.is_gated else 1  # before the activation function
    # stored per hidden value: in mode "all", and in "least"; a comparison has a byte
    activation_values = {"clipped_swiglu": 9, "squared_relu": 2 + 1 / item}.get(model.activation, 6)
    least_values = 1 + 1 / item if model.activation == "squared_relu" else matrices
    rows, choices = sizes.rows, own * moe.top_k
    if mode == "all":
        total = squares * (4 + item) + 2 * statistics  # exponentials, and quotients for the next product
        total += 3 * norms * stream_32 + stream + item * 2 * (query + keys)
        total += 12 * (query + key) if model.qk_norm else 0
        total += activation_values * hidden_values + (stream if mlps else 0)
        total += item * model.hidden_size * ((1 + bool(mlps)) * gathered + max(len(mlps) - 1, 0) * whole)
    elif mode in ("least", "fused"):
        total = squares * 4 + 2 * statistics + norms * stream + item * 2 * (query + keys)
        total += item * (query + key) if model.qk_norm else 0
        total += (_FUSED_HIDDEN if mode == "fused" else least_values) * hidden_values
        total += _FUSED_STREAMS * stream if mode == "fused" else 0
        total += item * model.hidden_size * (1 + len(mlps)) * whole
    else:
        total = stream  # a block's input, or the output of its MLP or mixer, which is a product
        if mode == "dots":
            total += (norms - 1) * stream + item * (query + 2 * key) + matrices * hidden_values
    if mode in ("all", "fused", "least"):
        total += copies
    total += _latent_bytes(sizes, model, mode)
    if model.attention.output_gate:
        total += item * query * {"all": 3, "full": 0}.get(mode, 1)  # of the gates: results, and what these multiply
    if kind != "moe" or (mode in ("dots", "full") and remat_unit == "period"):
        return total + (own * moe.num_experts * 4 if kind == "moe" and mode == "dots" else 0)
    # received and returned rows, and their destinations
    total += item * model.hidden_size * (rows.computed + rows.sent) + 4 * rows.sent
    of_hidden = {"all": activation_values, "fused": _FUSED_HIDDEN, "least": least_values}.get(mode, 0)
    total += of_hidden * rows.computed * moe.intermediate_size / sizes.expert_tensor * item
    logits = 4 * own * moe.num_experts * moe.slots_per_expert
    least = logits + 16 * choices
    total += {"all": 2 * logits + stream_32 + 16 * choices, "fused": least, "least": least, "dots": logits}.get(mode, 0)
    if moe.shared_gate and mode == "all":
        total += item * model.hidden_size * sizes.tokens  # the output of shared experts, before its gate
    if rows.ragged:
        total += stream + (rows.computed * model.hidden_size if mode == "all" else 0)  # rows to send again; a mask
    return total


def _latent_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Bytes that latent queries, keys and values add: values of their norms, and the inputs of the heads.

    Latents are gathered instead of the block's input, and they travel around a ring instead of keys and values.
    """
    latent, item, own = model.latent, sizes.item, sizes.local_tokens
    if latent.kv_lora_rank is None or mode == "full":
        return 0.0
    query_width, gathers = latent.q_lora_rank or model.hidden_size, sizes.tokens > own
    normed = own * ((latent.q_lora_rank or 0) + latent.kv_lora_rank)
    rotated = latent.qk_rope_head_dim  # the same key in all heads
    if mode == "dots":
        return item * (normed + own * rotated - sizes.tokens * sizes.heads * rotated)
    total = normed * ((12 if mode == "all" else 0) + item)
    if gathers:
        whole = sizes.tokens - (own if mode == "all" else 0)
        total += item * (sizes.tokens * (query_width + latent.kv_lora_rank + rotated) - whole * model.hidden_size)
    else:
        total += item * own * query_width
    if sizes.ring:
        total -= item * sizes.tokens * sizes.kv_heads * (model.qk_width + model.v_width)
    return total


def mtp_bytes(config: Config, sizes: DeviceSizes) -> float:
    """Bytes that multi-token prediction stores besides its block's own: embeddings of next tokens, the features of the
    decoder's last block, and both joined.
    """
    width = 4 * config.model.hidden_size * config.model.num_nextn_predict_layers
    return sizes.item * sizes.local_tokens * width


class _DeferredCounts(NamedTuple):
    """Counts of values that a block stores for deferred weight gradients, in addition to forward activations."""

    float32: int  # values as wide as the residual stream: results of norms
    queries: int
    hidden: int  # values as wide as the hidden layers of MLPs and experts
    rows: int  # outputs of MLPs and experts
    pairs: int


_DEFERRED: dict[Mode, _DeferredCounts] = {
    "all": _DeferredCounts(float32=0, queries=0, hidden=0, rows=0, pairs=0),  # all re-use the buffers of activations
    # with logits of all pairs so do queries, keys and the first row
    "least": _DeferredCounts(float32=2, queries=1, hidden=2, rows=1, pairs=0),
    "dots": _DeferredCounts(float32=2, queries=5, hidden=4, rows=2, pairs=1),
    "full": _DeferredCounts(float32=1, queries=6, hidden=4, rows=2, pairs=0),
}


def deferred_bytes(sizes: DeviceSizes, model: ModelConfig, kind: str, mode: Mode) -> float:
    """Bytes that a block's activation gradients leave to weight gradients that run later, as read off traced steps.

    Values that fit into buffers of activations that are no longer read do not count: those of the softmax, or all that
    a `remat` stores. Attention in tiles leaves no such buffers.
    """
    moe, counts, computed = model.moe, _DEFERRED[mode], sizes.rows.computed if kind == "moe" else 0
    mlps = _mlps(model, kind)
    hidden = sizes.tokens * sum(mlps) / sizes.tensor + computed * moe.intermediate_size / sizes.expert_tensor
    rows = model.hidden_size * (sizes.local_tokens * len(mlps) + computed)
    pairs = 0 if sizes.tile else sizes.pairs
    if mode == "least" and pairs == 0:
        counts = counts._replace(queries=_DEFERRED["full"].queries)
    numbers = counts.queries * sizes.tokens * sizes.heads * model.qk_width + counts.hidden * hidden + counts.rows * rows
    deferred = 4 * counts.float32 * sizes.local_tokens * model.hidden_size + sizes.item * (
        numbers + counts.pairs * pairs
    )
    reused = 4 * pairs if mode == "least" else stored_bytes(sizes, model, kind, mode, "task")
    return max(0.0, deferred - reused)
