"""Schedules of deep models: equal groups of blocks run in scans, and all iterations of a scan use the same task list.

An iteration ends before the next one starts, so a schedule overlaps tasks only within one iteration. Reductions are the
exception: each iteration of the backward scan sums the gradients of the iteration above it, which are complete.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_jax.schedule.actions import Action, Seconds, StreamOf, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule
from moe_jax.schedule.dependencies import Needs, all_reductions, task_graph
from moe_jax.schedule.grad_buckets import fill_gaps
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape

_MIN_ITERATIONS = 3  # of a scan; the backward pass of the highest iteration is outside of it


@dataclass(frozen=True)
class ScannedBlocks:
    """The blocks of a scan: `count` iterations of `size` blocks each, from block `first` up.

    All iterations have the same kinds of blocks.
    """

    first: int
    size: int
    count: int

    @classmethod
    def of(cls, first: int, period: int, repeats: int, unroll: int) -> "ScannedBlocks | None":
        """Group `repeats` equal periods of blocks into iterations of `unroll` periods.

        Periods that do not fill an iteration are left over at the top. Returns None if there are too few iterations for
        a scan to shorten the program.
        """
        count = repeats // unroll
        return cls(first, period * unroll, count) if count >= _MIN_ITERATIONS else None

    @property
    def last(self) -> int:
        """The block above the highest iteration."""
        return self.first + self.size * self.count

    def iteration_of(self, action: Action) -> int:
        """The iteration that a task belongs to; -1 below all iterations, `count` above."""
        if action.op in ("head", "counts"):
            return self.count
        return min(max((action.block - self.first) // self.size, -1), self.count)


class ScannedSchedule(NamedTuple):
    """A step in issue order. The tasks of scan bodies are named as iteration 0 runs them."""

    blocks: ScannedBlocks
    prologue: tuple[Action, ...]  # forward, below the iterations
    forward_body: tuple[Action, ...]  # body: forward, from iteration 0 to the highest
    middle: tuple[Action, ...]  # tasks above the iterations, and the backward pass of the highest one
    backward_body: tuple[Action, ...]  # body: backward, down to iteration 0, with reductions of the iteration above
    epilogue: tuple[Action, ...]  # backward, below the iterations, and the remaining reductions
    reduction_body: tuple[Action, ...]  # body: reductions after the backward pass, from the highest iteration to 0
    last_reductions: tuple[Action, ...]  # reductions below the iterations, after those

    def without_reductions(self) -> "ScannedSchedule":
        """The same schedule without reductions: gradients stay local to each device."""
        bare = (tuple(action for action in part if not is_reduction(action)) for part in self[1:])
        return ScannedSchedule(self.blocks, *bare)

    def actions(self) -> tuple[Action, ...]:
        """The tasks of all iterations, one after another."""
        count, size = self.blocks.count, self.blocks.size

        def run(body: Iterable[Action], iterations: Iterable[int]) -> Iterator[Action]:
            return (
                action._replace(block=action.block + iteration * size) for iteration in iterations for action in body
            )

        return (
            *self.prologue,
            *run(self.forward_body, range(count)),
            *self.middle,
            *run(self.backward_body, reversed(range(count - 1))),
            *self.epilogue,
            *run(self.reduction_body, reversed(range(count))),
            *self.last_reductions,
        )


def make_scanned(
    policy: str, shape: StepShape, blocks: ScannedBlocks, seconds: Seconds, stream_of: StreamOf = three_streams
) -> tuple[Schedule, ScannedSchedule]:
    """Order a step whose equal blocks run in scans. Returns the whole list of tasks, and its parts.

    Arguments are those of `make_schedule`, and the blocks of the scan. The order is that of a model with two
    iterations: the lower one stands for all iterations that have one above them, the upper one for the highest. Raises
    ScheduleError.
    """
    more = blocks.size * (blocks.count - 2)

    def in_whole(action: Action) -> Action:
        return action if action.block < blocks.first + blocks.size else action._replace(block=action.block + more)

    issued = make_schedule(
        policy, _two_iterations(shape, blocks), lambda action: seconds(in_whole(action)), stream_of
    ).actions
    tasks = [in_whole(action) for action in issued if not is_reduction(action)]
    forward = [task for task in tasks if task.direction == "F"]
    backward = [task for task in tasks if task.direction != "F"]
    sums = all_reductions(shape)
    needs = task_graph(shape)

    def of(tasks: Sequence[Action], *wanted: int) -> list[Action]:
        return [task for task in tasks if blocks.iteration_of(task) in wanted]

    def filled(tasks: list[Action], reductions: list[Action]) -> tuple[Action, ...]:
        return _with_reductions(tasks, reductions, needs, seconds, stream_of) if reductions else tuple(tasks)

    highest, above = blocks.count - 1, blocks.count
    top = of(forward, above) + of(backward, highest, above)
    down, end = of(backward, 0), of(backward, -1)
    at_end = shape.grad_reduce == "end"
    scanned = ScannedSchedule(
        blocks=blocks,
        prologue=tuple(of(forward, -1)),
        forward_body=tuple(of(forward, 0)),
        middle=tuple(top) if at_end else filled(top, of(sums, above)),
        backward_body=tuple(down) if at_end else filled(down, of(sums, 1)),
        epilogue=(*end, *of(sums, above)) if at_end else filled(end, of(sums, 0, -1)),
        reduction_body=tuple(of(sums, 0)) if at_end else (),
        last_reductions=tuple(of(sums, -1)) if at_end else (),
    )
    return Schedule(policy, shape, scanned.actions()), scanned


def _two_iterations(shape: StepShape, blocks: ScannedBlocks) -> StepShape:
    """The same shape with two iterations."""
    below, above = blocks.first + 2 * blocks.size, blocks.last
    return replace(
        shape,
        kinds=shape.kinds[:below] + shape.kinds[above:],
        reductions=shape.reductions[: 1 + below] + shape.reductions[1 + above :],
    )


def _with_reductions(
    tasks: Sequence[Action], reductions: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf
) -> tuple[Action, ...]:
    """Place `reductions` between `tasks` where no exchange is ready. Dependencies outside of both are complete."""
    inside = {*tasks, *reductions}
    needs_inside = {task: needs[task] & inside for task in inside}
    place = {task: i for i, task in enumerate(tasks)}
    by_readiness = sorted(reductions, key=lambda task: max((place[need] for need in needs_inside[task]), default=-1))
    return tuple(fill_gaps([*tasks, *by_readiness], needs_inside, seconds, stream_of))
