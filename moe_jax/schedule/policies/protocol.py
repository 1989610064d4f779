"""The interface of a policy, and the breadth-first order that the built-in ones share."""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from moe_jax.schedule.actions import NO_BLOCK, Action, Stream, stream_of_op
from moe_jax.schedule.shape import Parts, StepShape

Orders = dict[Stream, list[Action]]  # the order of F tasks, B tasks and the counts on each stream


class Policy(NamedTuple):
    """The number of parts, and the order of each stream. W tasks and reductions are placed afterwards."""

    parts: Callable[[int], Parts]  # by the degree; raises ScheduleError if the policy has no such degree
    orders: Callable[[StepShape], Orders]


def breadth_first(shape: StepShape) -> Orders:
    """Breadth-first order: all parts of one phase, then all parts of the next; the backward pass is the mirror image.

    A phase is a run of stages on one stream. Between two exchanges, compute goes through the stages of a phase
    microbatch by microbatch: dense blocks below an MoE block belong to the phase of its attention. This is the order
    of FlowMoE, eqs. 2-5: compute AT1…ATR E1…ER, communication D1…DR C1…CR, block by block.
    """
    streams: Orders = {stream: [] for stream in Stream}
    phases = [(stream, list(run)) for stream, run in groupby(shape.stages, lambda stage: stream_of_op(stage.op))]
    for stream, run in phases:
        tasks = zip(*(shape.tasks_of("F", stage) for stage in run), strict=True)
        streams[stream] += [task for part in tasks for task in part]
    if "moe" in shape.kinds:
        streams[Stream.COMMUNICATION].append(Action("G", "counts", NO_BLOCK, 0))
    for stream, run in reversed(phases):
        tasks = zip(*(shape.tasks_of("B", stage)[::-1] for stage in reversed(run)), strict=True)
        streams[stream] += [task for part in tasks for task in part]
    return streams
