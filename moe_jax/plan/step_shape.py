"""The tasks of a config's step, before they have an order."""

import math
from collections.abc import Mapping, Sequence

from moe_jax.config import Config
from moe_jax.schedule.build import make_shape
from moe_jax.schedule.shape import StepShape


def step_shape(config: Config, mesh: Mapping[str, int], reductions: Sequence[int]) -> StepShape:
    """The shape of a step on a mesh of these sizes, with `reductions` buckets per owner. Raises ScheduleError."""
    settings, model = config.schedule, config.model
    copies = math.prod(mesh[axis] for axis in ("data", "context") if axis not in config.mesh.expert_axes)
    return make_shape(
        settings.policy,
        model.block_kinds,
        settings.microbatches,
        settings.backward_microbatches,
        settings.expert_chunks,
        weight_grad=settings.weight_grad,
        grad_reduce=settings.grad_reduce,
        param_gather=config.param_gather,
        reductions=tuple(reductions),
        tied=model.tie_word_embeddings,
        mtp=model.has_mtp,
        # all tensor ranks have the bias vectors of an expert that they share
        local_experts=copies == 1 and not (model.moe.bias and config.mesh.expert_tensor_ranks(mesh) > 1),
    )
