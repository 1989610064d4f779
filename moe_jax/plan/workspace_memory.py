"""Workspace memory: bytes per device for a block's backward pass and for the head."""

import math
from collections.abc import Mapping

from moe_jax.config import Config, ModelConfig
from moe_jax.plan.activation_memory import Mode, longest_loop, stored_bytes
from moe_jax.plan.compilers import Compiler
from moe_jax.plan.device_sizes import DeviceSizes
from moe_jax.plan.recurrent import recurrent_layer, recurrent_share
from moe_jax.plan.resources import count_parameters
from moe_jax.plan.work import logit_chunk
from moe_jax.schedule.scanned import ScannedBlocks

_LANES = 128  # of a TPU's vectors


def working_bytes(
    config: Config, sizes: DeviceSizes, compiler: Compiler, mode: Mode, mesh: Mapping[str, int], transposed: int
) -> float:
    """Bytes of a block's backward pass: attention's squares, or the experts' rows, and recomputed values.

    The heads of `transposed` blocks are transposed.
    """
    model, rows, item = config.model, sizes.rows, sizes.item
    in_block = in_blocks(config, mesh) / model.num_blocks
    squares = sizes.pairs * (compiler.pair_bytes + 2 * item)
    squares += _linear_bytes(sizes, model)
    if share := recurrent_share(model):  # blocks of different kinds are not at work at the same time
        of_recurrent = sizes.tokens / sizes.tensor * recurrent_layer(model).working_bytes()
        squares = max(squares, of_recurrent) if share < 1 else of_recurrent
    if mode in ("dots", "full"):
        total = _recomputed_bytes(config, sizes, compiler, in_block, squares)
    else:
        flowing = item * (rows.sent * model.hidden_size + _hidden_values(sizes, model))
        total = max(squares, (1 if mode == "fused" else 4) * flowing) / sizes.microbatches
    if rows.ragged:
        total += (
            item * model.hidden_size * (compiler.overflow_copies * sizes.microbatches * rows.overflow + 2 * rows.sent)
        )
    if mode == "all" and compiler.transposed_heads:
        heads = sizes.tokens * (sizes.heads * model.qk_width + sizes.kv_heads * (model.qk_width + model.v_width))
        total += item * heads * transposed
    return total


def _hidden_values(sizes: DeviceSizes, model: ModelConfig) -> float:
    """Numbers in a hidden layer of a block's routed experts."""
    return sizes.rows.computed * model.moe.intermediate_size / sizes.expert_tensor


def _recomputed_bytes(config: Config, sizes: DeviceSizes, compiler: Compiler, in_block: float, squares: float) -> float:
    """Bytes of the backward pass of what `schedule.remat` recomputes at once; a block has `in_block` parameters.

    In a loop over blocks XLA fuses what is recomputed with what reads it. The experts' backward pass has all recomputed
    values in memory, attention's no longer has those of experts.
    """
    model, rows, item, hidden = config.model, sizes.rows, sizes.item, _hidden_values(sizes, config.model)
    blocks = period_of(config) if config.step_facts.remat_unit == "period" else 1
    kinds = model.block_kinds[-blocks:]
    mean_rows = (rows.sent + rows.computed) / 2
    if config.schedule.unroll < longest_loop(config):
        again = sum(stored_bytes(sizes, model, kind, "fused", "task") for kind in kinds)
        flowing, kept_hidden = item * (compiler.row_copies * mean_rows * model.hidden_size + hidden), 3
    else:
        again = sum(stored_bytes(sizes, model, kind, "all", "task") for kind in kinds)
        again -= 0 if sizes.tile else len(kinds) * sizes.pairs * item  # quotients are recomputed
        flowing, kept_hidden = 4 * item * (rows.sent * model.hidden_size + hidden), 6
    of_rows = item * (2 * mean_rows * model.hidden_size + kept_hidden * hidden) if "moe" in kinds else 0
    total = max(again + flowing, again - of_rows - 4 * sizes.pairs + squares + item * sizes.pairs)
    casts_all = compiler.casts_of_blocks and not config.step_facts.orders_tasks and config.optimizer.zero < 3
    return total / sizes.microbatches + item * in_block * (model.num_blocks if casts_all else blocks)


def _linear_bytes(sizes: DeviceSizes, model: ModelConfig) -> float:
    """Bytes of attention's backward pass that are linear in the number of tokens, as far as they are not stored.

    A ring has gradients of queries and of three ranks' keys in float32, and keys of two ranks; other tiles have
    gradients in float32. The splash kernel has transposed gradients, and each query's log-sum-exp in all lanes of a
    vector.
    """
    query, keys = sizes.heads * model.qk_width, sizes.kv_heads * (model.qk_width + model.v_width)
    if sizes.ring:
        return sizes.tokens * (4 * (query + 3 * keys) + 2 * sizes.item * keys)
    if sizes.tile:
        return sizes.tokens * 4 * (query + keys * sizes.keys / sizes.length)
    return sizes.tokens * (sizes.item * (query + keys) + 4 * _LANES * sizes.heads) if sizes.kernel == "splash" else 0.0


def iteration_bytes(config: Config, sizes: DeviceSizes, compiler: Compiler, mesh: Mapping[str, int]) -> float:
    """Bytes of the gradients of a scan iteration, in flight and as whole arrays, and of its weights' casts.

    With ZeRO 3 XLA:TPU writes gradients into the buckets that are summed.
    """
    if not config.step_facts.orders_sums:
        return 0.0
    has_own = compiler.own_gradients or ScannedBlocks.of_config(config)
    whole = 0 if config.optimizer.zero == 3 and compiler.own_gradients else 4
    share = min(period_of(config) / config.model.num_blocks, 1)
    own = (whole + sizes.item) * in_blocks(config, mesh) * share if has_own else 0.0
    return _gradients_in_flight(config, mesh) + own


def exchange_target_bytes(config: Config, sizes: DeviceSizes, compiler: Compiler) -> float:
    """Bytes that the exchanges of a block's backward pass in a loop fill, where they exist at once.

    They are a buffer of rows that leave for other devices, and three of those that come. XLA:GPU has them if tasks are
    recomputed.
    """
    is_recomputed = config.schedule.remat in ("dots", "full")
    rows, at_once = sizes.rows, (compiler.exchange_targets or is_recomputed) and config.optimizer.zero < 3
    if not at_once or not rows.ragged or ScannedBlocks.of_config(config) is None:
        return 0.0
    return sizes.item * config.model.hidden_size * (3 * rows.computed + rows.sent)


def _gradients_in_flight(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of the gradients of a scan iteration, as buckets that are being summed and as whole arrays."""
    counts, schedule = count_parameters(config.model), config.schedule
    if schedule.grad_reduce == "end":
        return 0.0
    copies, shared_by = mesh["data"] * mesh["context"] * mesh["expert"], config.mesh.expert_tensor_ranks(mesh)
    ranks = config.mesh.expert_ranks(mesh) * shared_by // mesh["tensor"]
    summed = counts.heads_and_hidden / mesh["tensor"] * (copies > 1)
    summed += _expert_parameters(config, mesh) / shared_by * (copies > ranks)
    return 2 * 4 * summed * min(schedule.unroll * period_of(config) / config.model.num_blocks, 1)


def in_blocks(config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters of a device in products of blocks, which are cast to the compute dtype."""
    counts = count_parameters(config.model)
    experts = _expert_parameters(config, mesh) / config.mesh.expert_tensor_ranks(mesh)
    return counts.heads_and_hidden / mesh["tensor"] + experts


def _expert_parameters(config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters of an expert rank, all its tensor ranks together, with slots for replicas."""
    of_slot = count_parameters(config.model).expert / max(config.model.moe.num_experts, 1)
    return of_slot * config.expert_slots(mesh) / config.mesh.expert_ranks(mesh)


def period_of(config: Config) -> int:
    """The number of blocks that a plain step recomputes at once."""
    model = config.model
    of_experts = model.moe.moe_layer_freq if model.moe.num_experts else 1
    return min(math.lcm(of_experts, model.recurrent_period), model.num_layers)


def head_bytes(config: Config, sizes: DeviceSizes, compiler: Compiler, mode: Mode) -> float:
    """Bytes of the logits and values computed from them."""
    model = config.model
    matrix = model.vocab_size * model.hidden_size
    chunk = logit_chunk(config, sizes.local_tokens)
    if chunk is not None:
        return (4 + sizes.item) * chunk * model.vocab_size + sizes.item * matrix
    # a head task has both losses before its backward task; plain steps compute one after the other
    heads = 1 + model.num_nextn_predict_layers * config.step_facts.orders_tasks
    values = sizes.local_tokens * model.vocab_size * heads
    logits = 4 * values  # of all microbatches; the gradient is of one
    if compiler.logit_gradients:
        logits += sizes.item * values / sizes.microbatches
    head = logits + sizes.item * matrix
    if compiler.recasts_head and mode in ("dots", "full"):
        head += sizes.item * matrix + 3 * 4 * sizes.local_tokens * model.hidden_size
    return head
