"""Gradient memory of a step without pipeline stages, and the memory that its update needs.

With ZeRO (Rajbhandari et al. 2020, section 5) a device has its own shard of the gradients as soon as they are summed:
after the backward pass, or after each scan iteration if a schedule sums inside the scan. Updated shards of parameters
are gathered one array after another.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.activation_memory import is_fused
from moe_jax.plan.compilers import COMPILERS
from moe_jax.plan.gradients import ITEM_BYTES, own_parameters
from moe_jax.plan.resources import count_parameters, owned_parameters
from moe_jax.plan.work import ITEM_BYTES as CAST_BYTES

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
    update = earlier + summed
    if stage:
        largest = max(matrix, _expert_matrices(config, mesh))
        scattered = count + own + (largest if compiler.scatters_rows else 0) if at_end else summed
        update = max(scattered, 2 * own + (_GATHERED * largest if stage < 3 else 0))
    if is_fused(config, platform):
        cast = CAST_BYTES[config.train.compute_dtype]
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
