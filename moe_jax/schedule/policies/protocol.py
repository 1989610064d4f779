"""The interface of a policy."""

from collections.abc import Callable
from typing import NamedTuple

from moe_jax.schedule.actions import Action, Stream
from moe_jax.schedule.shape import Parts, StepShape

Orders = dict[Stream, list[Action]]  # the order of F tasks, B tasks and the counts on each stream


class Policy(NamedTuple):
    """The number of parts, and the order of each stream. W tasks and reductions are placed afterwards."""

    parts: Callable[[int], Parts]  # by the degree; raises ScheduleError if the policy has no such degree
    orders: Callable[[StepShape], Orders]
