"""The three kinds of training step, and their properties, which can be read without building a step.

`moe_jax.step.kinds` builds the steps. Planners, checks and reports read these properties instead of a kind's name.
"""

from dataclasses import dataclass
from typing import Literal

StepKindName = Literal["plain", "scheduled", "pipelined"]
RematUnit = Literal["period", "task"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Properties that hold for every step of a kind."""

    orders_tasks: bool
    """The step fixes the order of its tasks and differentiates each task separately. Otherwise autodiff differentiates
    the whole model, and the compiler chooses the order."""

    orders_sums: bool
    """Sums of gradients over devices are tasks on flat vectors, which a schedule may place inside the backward pass.
    Otherwise they follow the backward pass, one for each array."""

    has_ticks: bool
    """The step runs a table of ticks, in which pipeline stages compute passes over microbatches."""

    remat_unit: RematUnit
    """What `schedule.remat` recomputes at once: a period of blocks together with its exchanges, or one task, which is
    never an exchange."""

    keeps_weight_casts: bool
    """Without remat, the casts of all blocks' weights to the compute type are stored for the backward pass."""


STEP_FACTS: dict[StepKindName, StepFacts] = {
    "plain": StepFacts(
        orders_tasks=False, orders_sums=False, has_ticks=False, remat_unit="period", keeps_weight_casts=True
    ),
    "scheduled": StepFacts(
        orders_tasks=True, orders_sums=True, has_ticks=False, remat_unit="task", keeps_weight_casts=False
    ),
    "pipelined": StepFacts(
        orders_tasks=True, orders_sums=False, has_ticks=True, remat_unit="task", keeps_weight_casts=False
    ),
}
