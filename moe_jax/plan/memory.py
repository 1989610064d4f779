"""Memory of each device that a training step takes, as XLA's buffer assignment counts it.

The state (float32 parameters and the optimizer's moments) is there all the time and is exact; a step writes the new
state over the old one. Other memory differs between the moments of a step, and the largest one counts:
- head: activations of all blocks (`plan/activation_memory.py`), logits and their gradient, the head's cast and
  gradient;
- highest: in a scheduled step with a loop over blocks, the backward pass of the blocks above it: the same activations,
  the gradients of these blocks and of the head (on TPUs of all blocks), and the workspace of one block;
- backward: the same activations, then without those blocks'; all gradients but the embedding's, which comes last; and
  the workspace of one block;
- update: all gradients, and roughly what Muon's iterations need.

With ZeRO (Rajbhandari et al. 2020, section 5) a device has its own shard of the gradients as soon as they are summed:
after the backward pass, or after each scan iteration if a schedule sums inside the scan. Updated shards of parameters
are gathered one array after another.

XLA's `memory_analysis()` reports the total as argument + temporary + result − aliased bytes. Memory that a compiler
uses beyond that is not derived: `plan/compilers.py` has what was observed.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config, Sections
from moe_jax.config.attention_kernels import HOPPER, Capability
from moe_jax.config.layer_layout import segments
from moe_jax.errors import ConfigError
from moe_jax.plan.activation_memory import Mode, is_fused, mode_of, mtp_bytes, stored_bytes
from moe_jax.plan.compilers import COMPILERS
from moe_jax.plan.device_sizes import DeviceSizes, sizes_of
from moe_jax.plan.gradients import ITEM_BYTES, own_parameters
from moe_jax.plan.hot_experts import copies_bytes, stored_copies_bytes
from moe_jax.plan.memory_parts import TEMPORARIES, Moment, StepMemory, moments_of, update_bytes
from moe_jax.plan.offload import stored_activations
from moe_jax.plan.param_gathers import gathered_parameter_bytes, shard_cast_bytes, shard_transposes_bytes
from moe_jax.plan.pipelined_memory import pipelined_memory
from moe_jax.plan.recurrent import recurrent_share
from moe_jax.plan.resources import (
    count_parameters,
    owned_parameters,
    parameters_per_device,
)
from moe_jax.plan.stage_parameters import stage_parameters_of
from moe_jax.plan.work import ITEM_BYTES as CAST_BYTES
from moe_jax.plan.workspace_memory import (
    exchange_target_bytes,
    head_bytes,
    in_blocks,
    iteration_bytes,
    period_of,
    working_bytes,
)
from moe_jax.schedule.scanned import ScannedBlocks

_GATHERED = 1.5  # times an array: a shard, and all shards in another layout before they are put in place


class GradientMemory(NamedTuple):
    """Bytes of gradients on one device."""

    earlier: float  # of earlier parts of the batch
    backward: float  # including those, in the backward pass of the lowest block
    update: float


def gradient_memory(config: Config, platform: str, mesh: Mapping[str, int], count: int) -> GradientMemory:
    """The gradient memory of a device with `count` parameters.

    If XLA fuses a step without loops, gradients of blocks take the place of casts of their weights, until they are
    summed or the optimizer reads them.
    """
    compiler = COMPILERS[platform]
    model, stage, in_parts = config.model, config.optimizer.zero, config.train.grad_accumulation > 1
    own, matrix = own_parameters(owned_parameters(model), config, mesh), model.vocab_size * model.hidden_size
    each_summed = stage >= 2 and (config.step_facts.orders_sums or not compiler.sums_after_parts)
    earlier = (own if each_summed else count) if in_parts else 0.0
    # whether gradients are summed after the backward pass
    at_end = config.schedule.grad_reduce == "end" if config.step_facts.orders_sums else stage < 3
    at_end |= stage == 0
    summed = float(count) if at_end else own + (count if in_parts and stage == 1 and compiler.parts_apart else 0)
    backward = summed - (matrix if at_end and not model.tie_word_embeddings else 0)  # the embedding's comes last
    if in_parts and stage == 0 and compiler.parts_apart and config.step_facts.orders_sums:
        # a loop over blocks still reads those of earlier parts when it has added some
        backward += count if ScannedBlocks.of_config(config) else 0
    update = earlier + summed
    if stage:
        largest = max(matrix, _expert_matrices(config, mesh))
        scattered = count + own + (largest if compiler.scatters_rows else 0) if at_end else summed
        update = max(scattered, 2 * own + (_GATHERED * largest if stage < 3 else 0))
    if is_fused(config, platform):
        cast = ITEM_BYTES if config.step_facts.orders_sums else CAST_BYTES[config.train.compute_dtype]
        has_casts = config.schedule.remat not in ("dots", "full")
        is_summed = stage or in_parts or math.prod(mesh.values()) > 1
        return GradientMemory(
            ITEM_BYTES * earlier,
            ITEM_BYTES * earlier + cast * (matrix if has_casts else backward),
            (ITEM_BYTES if is_summed else cast) * update,
        )
    return GradientMemory(ITEM_BYTES * earlier, ITEM_BYTES * (earlier + backward), ITEM_BYTES * update)


def _expert_matrices(config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters of a device in one matrix of all experts, stacked over blocks."""
    ranks = config.mesh.expert_ranks(mesh) * config.mesh.expert_tensor_ranks(mesh)
    return count_parameters(config.model).expert / (ranks * (3 if config.model.is_gated else 2))


def step_memory(
    config: Config, platform: str, mesh: Mapping[str, int] | None = None, capability: Capability | None = HOPPER
) -> StepMemory:
    """The memory of a step on devices of a platform: tpu, gpu or cpu.

    `mesh` has the number of devices along each axis (None: that of the config), `capability` is that of GPUs. Raises
    ConfigError if an axis is open.
    """
    mesh = config.mesh.sizes if mesh is None else mesh
    for axis, ranks in mesh.items():
        if ranks < 1:
            raise ConfigError(f"mesh.{axis}={ranks} leaves memory open: say how many devices there are along this axis")
    if config.step_facts.has_ticks:
        return pipelined_memory(config, platform, mesh, capability)
    model, sizes, facts = config.model, sizes_of(config, platform, mesh, capability), config.step_facts
    count = parameters_per_device(config, mesh)
    matrix = model.vocab_size * model.hidden_size
    mode = mode_of(config, platform)
    compiler, in_products = COMPILERS[platform], in_blocks(config, mesh)
    activations = _stored_by_blocks(config, sizes, mode, in_products) + copies_bytes(config, sizes.item)
    activations += model.block_kinds.count("moe") * stored_copies_bytes(config, sizes.item)
    if config.train.grad_accumulation > 1 and compiler.casts_of_parts and config.optimizer.zero < 3:
        activations += sizes.item * in_products
    activations, on_host = stored_activations(config, platform, activations)
    above = _above_loop(config, sizes, mode)
    gathered, own = gathered_parameter_bytes(config, mesh), own_parameters(owned_parameters(model), config, mesh)
    gathered += shard_cast_bytes(config, mesh) if compiler.casts_of_shards else 0
    gathered += shard_transposes_bytes(config, mesh) if compiler.transposes_of_shards else 0
    gradients = gradient_memory(config, platform, mesh, count)
    flat = compiler.flat_copies if facts.orders_sums and math.prod(mesh.values()) > 1 else 0
    head_gradient = (sizes.item if is_fused(config, platform) and not facts.orders_sums else 4) * matrix
    working = working_bytes(config, sizes, compiler, mode, mesh, model.num_blocks)
    working += exchange_target_bytes(config, sizes, compiler) if facts.orders_tasks else 0
    of_iteration = iteration_bytes(config, sizes, compiler, mesh)
    moments: dict[Moment, dict[str, float]] = {
        "head": {
            "activations": activations,
            "gathered": gathered,
            "gradients": gradients.earlier + head_gradient * (1 + flat),
            "head": head_bytes(config, sizes, compiler, mode),
        },
        "backward": {
            "activations": activations - (0 if on_host else above.activations),
            "gathered": gathered,
            "gradients": gradients.backward,
            "working": working + of_iteration,
        },
        "update": {
            "gradients": gradients.update,
            "working": update_bytes(config, platform, mesh),
        },
    }
    if above.blocks:
        of_blocks = ITEM_BYTES * above.blocks * in_products / model.num_blocks
        of_blocks += 0 if config.optimizer.zero else head_gradient
        moments["highest"] = {
            # what is recomputed includes what these blocks have stored
            "activations": activations - (above.activations if mode in ("dots", "full") and not on_host else 0),
            "gathered": gathered,
            "gradients": gradients.backward if compiler.stacks_first else gradients.earlier + of_blocks,
            "working": working + (0 if compiler.stacks_first else of_iteration),
        }
    moment: Moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(moments[moment].get(name, 0)) for name in TEMPORARIES}
    return StepMemory(
        moment=moment,
        parameters=4 * (int(own) if config.optimizer.zero == 3 else count),
        **moments_of(owned_parameters(model), config, mesh, platform),
        activations_on_host=int(on_host),
        batch=int(4 * sizes.sequences * config.train.grad_accumulation * (config.data.seq_len + 1)),
        **parts,
        lost=int((compiler.gaps - 1) * sum(parts.values())),
    )


def parameter_bytes(config: Sections) -> int:
    """Bytes of a device's parameters between steps."""
    mesh, has_ticks = config.mesh.sizes, config.step_facts.has_ticks
    if config.optimizer.zero == 3:
        owned = stage_parameters_of(config) if has_ticks else owned_parameters(config.model)
        return int(4 * own_parameters(owned, config, mesh))
    if has_ticks:
        return 4 * stage_parameters_of(config).on_device(config, mesh)
    return 4 * parameters_per_device(config, mesh)


def least_bytes(config: Sections, platform: str) -> float:
    """A lower bound of `step_memory`: state and gradients.

    It is the same for all ways to recompute and to split the batch, and for all schedules of one kind of step.
    """
    has_ticks, parameters, mesh = config.step_facts.has_ticks, parameter_bytes(config), config.mesh.sizes
    stages = stage_parameters_of(config) if has_ticks else None
    own = own_parameters(stages or owned_parameters(config.model), config, mesh)
    gradients = 4 * (own + own)  # a shard, and its update
    if stages:
        gradients = 4 * stages.on_device(config, mesh)
    elif config.optimizer.zero == 0:
        gradients = parameters
    # moments and gradients are rounded down
    moments = moments_of(stages or owned_parameters(config.model), config, mesh, platform)["optimizer"]
    return parameters + moments - 1 + gradients - 1 + (COMPILERS[platform].pipelined_bytes if has_ticks else 0)


def _stored_by_blocks(config: Config, sizes: DeviceSizes, mode: Mode, in_products: float) -> float:
    """Bytes that all blocks store for their backward pass."""
    model, blocks, facts = config.model, Counter(config.model.block_kinds), config.step_facts
    total = sum(count * stored_bytes(sizes, model, kind, mode, facts.remat_unit) for kind, count in blocks.items())
    if (mode == "fused" or (mode == "all" and facts.keeps_weight_casts)) and config.optimizer.zero < 3:
        total += sizes.item * in_products  # weight casts are stacked like activations
    total = total / period_of(config) if facts.remat_unit == "period" and mode == "full" else total
    if facts.remat_unit == "period" and mode == "dots" and recurrent_share(model):
        # what experts add in the middle of a period is no product, so that the next block's input is not stored
        inside = sum(segment.repeats * segment.kinds[:-1].count("moe") for segment in segments(model))
        total -= sizes.item * sizes.local_tokens * model.hidden_size * inside
    return total + mtp_bytes(config, sizes)


class _AboveLoop(NamedTuple):
    """The blocks of the highest iteration of a scheduled step's loop, and those above it."""

    blocks: int  # 0 without a loop
    activations: float  # bytes that they store


def _above_loop(config: Config, sizes: DeviceSizes, mode: Mode) -> _AboveLoop:
    model, facts, loop = config.model, config.step_facts, ScannedBlocks.of_config(config)
    if not facts.orders_tasks or loop is None:
        return _AboveLoop(0, 0.0)
    kinds = model.block_kinds[loop.last - loop.size :]
    return _AboveLoop(len(kinds), sum(stored_bytes(sizes, model, kind, mode, facts.remat_unit) for kind in kinds))
