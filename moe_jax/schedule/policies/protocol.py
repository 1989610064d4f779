"""What a policy provides."""

from collections.abc import Callable
from typing import NamedTuple

from moe_jax.schedule.actions import Action, Stream
from moe_jax.schedule.shape import Parts, StepShape

Orders = dict[Stream, list[Action]]  # each stream's own order of F and B tasks and the counts


class Policy(NamedTuple):
    """How finely tasks are cut, and the order of each stream. W and reductions are placed afterwards."""

    parts: Callable[[int], Parts]  # of a degree; raises ScheduleError if the policy has no such degree
    orders: Callable[[StepShape], Orders]
