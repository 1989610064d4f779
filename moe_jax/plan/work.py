"""Work of the tasks of a step: floating-point operations and bytes sent, from a config alone."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from moe_jax.config import Config, ModelConfig
from moe_jax.config.attention_kernels import (
    ATTENTION_TILE,
    HOPPER,
    Capability,
    Kernel,
    kernel_of,
    splash_block,
    tile_of,
)
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.config.ragged_rows import sends_ragged_rows
from moe_jax.config.registry import HOOKS_FACTS
from moe_jax.plan.hot_experts import load_with_copies
from moe_jax.plan.recurrent import mean_over_blocks, recurrent_layer
from moe_jax.plan.resources import attention_matrices, gate_matrices, mean_mlp_width, mixed_matrices

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class OpWork(NamedTuple):
    """Floating-point operations of one op's forward pass, for one block and a device's tokens."""

    products: float  # in matrix products with weights; the backward pass has as many for each of two gradients
    rest: float = 0.0  # in products of activations; the backward pass has twice as many


def work_of(config: Config, tokens: float, platform: str) -> dict[str, OpWork]:
    """The work of each compute op on a device that has `tokens` tokens."""
    model, moe = config.model, config.model.moe
    matrices = 3 if model.is_gated else 2
    attention = 2 * tokens * attention_matrices(model)
    of_states = tokens * recurrent_layer(model).computed_flops
    scores = mean_over_blocks(model, attention_flops(config, tokens, platform), of_states)
    mixes = 2 * tokens * mixed_matrices(model)
    of_mlp = 2 * tokens * matrices * model.hidden_size
    rows = busiest_rows(config, tokens, platform)
    shared = of_mlp * (moe.intermediate_size * moe.num_shared_experts + model.intermediate_size * moe.dense_residual)
    mtp = (model.vocab_size + 2 * model.hidden_size) * model.num_nextn_predict_layers  # its logits and its input
    return {
        "embed": OpWork(0.0),
        "attend": OpWork(attention + shared + 2 * tokens * gate_matrices(model), scores + mixes),
        "dense": OpWork(attention + of_mlp * mean_mlp_width(model), scores),
        "expert": OpWork(2 * rows * matrices * model.hidden_size * moe.intermediate_size),
        "head": OpWork(2 * tokens * model.hidden_size * (model.vocab_size + mtp)),
    }


def attention_flops(config: Config, tokens: float, platform: str, capability: Capability | None = HOPPER) -> float:
    """Operations of the products of queries, keys and values in one block with attention, their mean."""
    model = config.model
    keys = computed_keys(config, platform, capability)
    return 2 * tokens * keys * model.num_attention_heads * (model.qk_width + model.v_width)


def computed_keys(config: Config, platform: str, capability: Capability | None = HOPPER) -> float:
    """The number of keys per query, computed masked ones included: a whole sequence, unless tiles are left out.

    It is the mean over blocks with attention, some of which may have a window. Tiles outside of chunks are computed.
    What cuDNN leaves out for a window is not known: predictions of published runs are nearer without. `capability` is
    that of the GPUs, as for `kernel_of`.
    """
    kernel, length = kernel_of(config, platform, capability), config.data.seq_len
    if kernel == "cudnn":
        return (length + 1) / 2
    tile = splash_block(length) if kernel == "splash" else attention_tile(config, kernel, config.mesh.context)
    if tile is None:
        return length
    return _mean(config.model, lambda window: _keys_in_tiles(length, tile, window))


def _keys_in_tiles(length: int, tile: int, window: int | None) -> float:
    """The mean number of keys per query in tiles with a visible one; tiles cover a sequence of this length."""
    tiles = length / tile
    most = tiles if window is None else min((window + tile - 2) // tile + 1, tiles)  # tiles of keys for one of queries
    return tile * (most - most * (most - 1) / (2 * tiles))


def _mean(model: ModelConfig, of_window: Callable[[int | None], float]) -> float:
    """The mean over blocks with attention of what is a function of their window."""
    windows = _windows(model)
    return sum(count * of_window(window) for window, count in windows.items()) / max(windows.total(), 1)


@functools.lru_cache(maxsize=64)
def _windows(model: ModelConfig) -> Counter[int | None]:
    """The windows of the blocks with attention; None: all earlier tokens are visible."""
    return Counter(view.window for view in model.views if not view.is_recurrent)


def logit_chunk(config: Config, tokens: float) -> int | None:
    """The number of a device's `tokens` with logits in memory at a time; None: all, or all of a microbatch."""
    parts = config.schedule.microbatches if config.schedule.cuts_batch else 1
    chunk = tokens_of_chunk(int(tokens / parts), config.model.vocab_size, config.train.loss_chunk)
    return chunk if chunk < int(tokens / parts) else None


def has_ring(config: Config) -> bool:
    """Whether keys and values travel around a ring of context ranks."""
    return config.mesh.context > 1 and config.exchange.context_form == "ring"


def context_hops(config: Config) -> float:
    """The number of other context ranks whose keys and values a rank receives in one block with attention, on average.

    A ring leaves out the ranks that a window does not reach: each of a rank's two pieces of a sequence needs as many
    pieces before it as the window is long (models/attention/tiles.py).
    """
    others, piece = config.mesh.context - 1, config.data.seq_len / (2 * config.mesh.context)
    if not has_ring(config):
        return others
    return _mean(
        config.model, lambda window: others if window is None else min(2 * math.ceil((window - 1) / piece), others)
    )


def attention_tile(config: Config, kernel: Kernel, context: int) -> int | None:
    """Tokens of a tile of queries or keys (models/attention/tiles.py); None if attention has no tiles.

    With context ranks, a piece of a sequence is assumed to be a multiple of a tile.
    """
    if context > 1 and (has_ring(config) or kernel == "tiled"):
        return min(ATTENTION_TILE, config.data.seq_len // (2 * context))
    return tile_of(config.data.seq_len) if kernel == "tiled" else None


def exchange_bytes(config: Config, tokens: float, ranks: int, platform: str) -> float:
    """Bytes of rows that a device has for all ranks in one dispatch or combine, its own rows and padding included."""
    return _sent_rows(config, tokens, ranks, platform) * config.model.hidden_size * row_item_bytes(config)


def row_item_bytes(config: Config) -> int:
    """Bytes of a number of an exchanged row, in all four exchanges; hooks of other packages are assumed to change none.

    The bfloat16 cotangents of `fp8` are counted as its rows, and a row's scale is not counted.
    """
    return HOOKS_FACTS.of(config.model.moe.hooks).row_item_bytes or ITEM_BYTES[config.train.compute_dtype]


def busiest_rows(config: Config, tokens: float, platform: str) -> float:
    """Rows that the experts of the busiest rank compute, padding included.

    Without a capacity they are `plan.load_factor` times the mean, less what copies of experts take over, and at most
    what the rank's buffer holds, and what all tokens can choose of its experts.
    """
    moe, most = config.model.moe, config.exchange.rank_capacity_factor
    rows = expert_rows(config, tokens, platform)
    if not moe.sends_sized_rows or moe.num_experts == 0:
        return rows
    load = min(config.plan.load_factor, _largest_load(config, config.mesh.expert_ranks(config.mesh.sizes)))
    if config.exchange.hot_experts:
        load = load_with_copies(config, config.mesh.sizes, load)
    return rows * (load if most is None else min(load, most))


def expert_rows(config: Config, tokens: float, platform: str) -> float:
    """Rows that a device's experts compute on average, padding included.

    Tokens of one microbatch may fill all slots of an expert. Unless only rows that exist are sent, each microbatch
    sends all slots, as many as it has tokens at most.
    """
    moe, schedule = config.model.moe, config.schedule
    if moe.gate_facts.mixes:
        return moe.num_experts * moe.slots_per_expert
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    parts = schedule.microbatches if schedule.cuts_batch and moe.capacity_factor is not None else 1
    if parts > 1 and sends_ragged_rows(config, platform, config.mesh.expert_tensor_ranks(config.mesh.sizes)):
        parts = 1
    return min(factor * moe.top_k * parts, moe.num_experts) * tokens


def _sent_rows(config: Config, tokens: float, ranks: int, platform: str) -> float:
    moe, factor = config.model.moe, config.exchange.rank_capacity_factor
    if not moe.sends_sized_rows or moe.num_experts == 0:
        return expert_rows(config, tokens, platform)
    worst = _largest_load(config, ranks)
    return tokens * moe.top_k * (worst if factor is None else min(factor, worst))


def _largest_load(config: Config, ranks: int) -> float:
    """Rows of a rank / the mean of the expert `ranks`, if every token chooses as many of its experts as it can."""
    moe = config.model.moe
    return ranks * min(moe.top_k, moe.num_experts // ranks) / moe.top_k


def gathered_widths(model: ModelConfig, kind: str) -> list[int]:
    """The numbers per token that tensor ranks gather in a block: for attention, and for an MLP that they share.

    Their summed outputs have the model's width.
    """
    moe, latent = model.moe, model.latent
    has_mlp = (kind == "dense" and model.num_mlp_blocks > 0) or moe.num_shared_experts > 0 or moe.dense_residual
    for_attention = model.hidden_size
    if latent.kv_lora_rank is not None:
        latents = (latent.q_lora_rank or model.hidden_size) + latent.kv_lora_rank + latent.qk_rope_head_dim
        for_attention = round(mean_over_blocks(model, latents, model.hidden_size))
    return [for_attention, *([model.hidden_size] if has_mlp else [])]


def context_width(model: ModelConfig, tensor: int) -> float:
    """The numbers per token that a context rank sends to the next one.

    They are counted per token of each of its `tensor` ranks' share.
    """
    if model.latent.kv_lora_rank is None:
        return model.kv_heads * (model.qk_width + model.v_width)  # each tensor rank sends its heads
    return tensor * (model.latent.kv_lora_rank + model.latent.qk_rope_head_dim)
