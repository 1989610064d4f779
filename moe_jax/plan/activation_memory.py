"""Activation memory: bytes per device that blocks store for their backward pass.

The stored values are those that jax stacks for the backward loop, read off the traced step:
- *all*: every value that a derivative reads. Plain steps, and scheduled ones on CPUs and GPUs.
- *least*: a minimum cut of them (`step/scheduled/min_cut_remat.py`). Scheduled steps on TPUs.
- *fused*: what XLA:GPU keeps if no loop stacks values, as it computes cheap ones again in the kernels that read them.
  Plain steps on GPUs with all blocks unrolled. Read off compiled programs (`profiling/unrolled_memory.py`).
- *chunk* (`schedule.remat`): those of *all* or *least*, but only during one backward pass of a pipeline stage.
- *dots*, *full*: the values that `schedule.remat` leaves. A plain step stores the input of a period of blocks, a
  scheduled one the input of every task: rows are not sent again.
"""

from typing import Literal, NamedTuple

from moe_jax.config import Config, ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.config.step_kinds import RematUnit
from moe_jax.plan.device_sizes import DeviceSizes
from moe_jax.plan.recurrent import mean_over_blocks, recurrent_layer, recurrent_share

Mode = Literal["all", "fused", "least", "dots", "full"]
_FUSED_HIDDEN = 3  # values of a hidden layer, with or without a gate
_FUSED_STREAMS = 4  # results of norms, attention and MLPs, as wide as the residual stream


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
    of_mixer, dense = _mixer_bytes(sizes, model, mode), model.block_kinds.count("dense")
    if kind != "dense" or model.num_mlp_blocks == dense:
        return of_mixer + _rest_bytes(sizes, model, kind, mode, remat_unit)
    with_mlp = model.num_mlp_blocks / dense
    without = (1 - with_mlp) * _rest_bytes(sizes, model, "mixer", mode, remat_unit)
    return of_mixer + without + with_mlp * _rest_bytes(sizes, model, "dense", mode, remat_unit)


def _mixer_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Bytes that attention or the recurrent layer of a block stores on average, without norms."""
    share = recurrent_share(model)
    of_attention = _attention_bytes(sizes, model, mode) if share < 1 else 0.0
    if not share:
        return of_attention
    of_recurrent = 0.0
    if mode != "full":
        layer = recurrent_layer(model)
        numbers = layer.projected_numbers if mode == "dots" else layer.stored_numbers
        of_recurrent = sizes.item * sizes.tokens * numbers(sizes.tensor)
    return mean_over_blocks(model, of_attention, of_recurrent)


def _attention_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Bytes that attention stores: queries, keys, values, and what its softmax needs."""
    if mode == "full":
        return 0.0
    item = sizes.item
    query = sizes.tokens * sizes.heads * model.qk_width
    key = sizes.tokens * sizes.kv_heads * (model.qk_width + model.v_width) / 2  # and value, on average
    total = _latent_bytes(sizes, model, mode)
    if model.attention.output_gate:
        total += item * query * (3 if mode == "all" else 1)  # of the gates: results, and what these multiply
    if mode == "dots":
        return total + item * (query + 2 * key)
    if model.qk_norm:
        total += (12 if mode == "all" else item) * (query + key)
    keys = key * sizes.keys / sizes.length  # if they are gathered, including those of other context ranks
    return total + item * 2 * (query + keys) + _softmax_bytes(sizes, model, mode)


def _softmax_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Bytes of statistics, of pairs of tokens unless tiles of them are recomputed, and of a kernel's own copies."""
    sums = 2 if sizes.kernel == "xla" else 1  # per query: a maximum and a sum, or their combination
    total = 4 * sums * sizes.sequences * sizes.heads * sizes.length
    if not sizes.tile:
        of_pair = 4 + sizes.item if mode == "all" else 4  # exponentials, and quotients for the next product
        total += of_pair * sizes.pairs
    if sizes.kernel == "cudnn":  # values and attention outputs, padded to the width of keys
        extra = model.qk_width - model.v_width
        total += sizes.item * sizes.tokens * (sizes.kv_heads * extra + sizes.heads * model.qk_width * bool(extra))
    elif sizes.kernel == "splash" and mode == "all":  # outputs in the kernel's layout, too
        total += sizes.item * sizes.tokens * sizes.heads * model.v_width
    return total


def _rest_bytes(sizes: DeviceSizes, model: ModelConfig, kind: str, mode: Mode, remat_unit: RematUnit) -> float:
    """Bytes that a block stores outside of its attention or recurrent layer."""
    mlps = _mlps(model, kind)
    hidden = sizes.tokens * sum(mlps) / sizes.tensor
    total = _residual_bytes(sizes, model, mode, norms=1 if kind == "mixer" else 2, mlps=len(mlps))
    total += sizes.item * hidden * _values_per_hidden(sizes, model, mode)
    return total + (_moe_bytes(sizes, model, mode, remat_unit) if kind == "moe" else 0.0)


def _residual_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode, *, norms: int, mlps: int) -> float:
    """Bytes of a block's input, its norms, and what tensor ranks gather for attention and for each MLP."""
    own, width = sizes.local_tokens, model.hidden_size * sizes.item
    whole = sizes.tokens if sizes.tokens > own else 0.0
    match mode:
        case "all":
            in_norms = 3 * norms * own * model.hidden_size * 4
            return in_norms + width * ((1 + bool(mlps)) * sizes.tokens + max(mlps - 1, 0) * whole)
        case "fused":
            return width * ((norms + _FUSED_STREAMS) * own + (1 + mlps) * whole)
        case "least":
            return width * (norms * own + (1 + mlps) * whole)
        case "dots":
            return width * norms * own  # its input and the output of its mixer, which is a product
        case "full":
            return width * own


def _values_per_hidden(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Values that are stored for each one of an MLP's or an expert's hidden layer. A comparison has a byte."""
    matrices = 2 if model.is_gated else 1  # before the activation function
    match mode:
        case "all":
            return {"clipped_swiglu": 9, "squared_relu": 2 + 1 / sizes.item}.get(model.activation, 6)
        case "fused":
            return _FUSED_HIDDEN
        case "least":
            return 1 + 1 / sizes.item if model.activation == "squared_relu" else matrices
        case "dots":
            return matrices
        case "full":
            return 0


def _moe_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode, remat_unit: RematUnit) -> float:
    """Bytes of the gate, of rows that are sent and returned, and of the experts' hidden layers."""
    moe, item, own, rows = model.moe, sizes.item, sizes.local_tokens, sizes.rows
    logits, choices = 4 * own * moe.num_experts * moe.slots_per_expert, own * moe.top_k
    remat = mode in ("dots", "full")
    if remat and remat_unit == "period":
        return own * moe.num_experts * 4 if mode == "dots" else 0.0
    # received and returned rows, and their destinations
    total = item * model.hidden_size * (rows.computed + rows.sent) + 4 * rows.sent
    if rows.ragged:  # rows to send again; a mask
        total += own * model.hidden_size * item + (rows.computed * model.hidden_size if mode == "all" else 0)
    if remat:
        return total + (logits if mode == "dots" else 0.0)
    hidden = rows.computed * moe.intermediate_size / sizes.expert_tensor
    total += item * hidden * _values_per_hidden(sizes, model, mode) + logits + 16 * choices
    if mode == "all":
        total += logits + own * model.hidden_size * 4  # the gate's input
        if moe.shared_gate:
            total += item * model.hidden_size * sizes.tokens  # the output of shared experts, before its gate
    return total


def _latent_bytes(sizes: DeviceSizes, model: ModelConfig, mode: Mode) -> float:
    """Bytes that latent queries, keys and values add: values of their norms, and the inputs of the heads.

    Latents are gathered instead of the block's input, and they travel around a ring instead of keys and values.
    """
    latent, item, own = model.latent, sizes.item, sizes.local_tokens
    if latent.kv_lora_rank is None:
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
