"""Schedules of deep models: equal groups of blocks run in scans, and all iterations of a scan use the same task list.

An iteration ends before the next one starts, so a schedule overlaps tasks only within one iteration. There are two
exceptions: each iteration of the backward scan sums the gradients of the iteration above it, which are complete, and
each iteration gathers the parameters of the next one. The highest iteration is outside of the scans: its tasks overlap
with those of the head, and its backward pass follows its forward pass, so that nothing of it is stacked. So is the
backward pass of the lowest one, whose tasks hide the last sums.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moe_jax.config import Sections
from moe_jax.config.layer_layout import MIN_ITERATIONS, Segment, segments
from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, is_param_gather, is_reduction, three_streams
from moe_jax.schedule.build import make_schedule
from moe_jax.schedule.dependencies import Needs, reductions_by_owner
from moe_jax.schedule.grad_buckets import fill_gaps
from moe_jax.schedule.param_gathers import needs_with_release
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape


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
        return cls(first, period * unroll, count) if count >= MIN_ITERATIONS else None

    @classmethod
    def of_longest(cls, runs: Sequence[Segment], unroll: int) -> "tuple[int, ScannedBlocks | None]":
        """The number of the run with most periods, and its blocks as iterations."""
        number, longest = max(enumerate(runs), key=lambda run: run[1].repeats)
        first = sum(len(run.kinds) * run.repeats for run in runs[:number])
        return number, cls.of(first, len(longest.kinds), longest.repeats, unroll)

    @classmethod
    def of_config(cls, config: Sections) -> "ScannedBlocks | None":
        """The blocks that a scheduled step of a config runs in scans; None without scans."""
        return cls.of_longest(segments(config.model), config.schedule.unroll)[1]

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
    forward_body: tuple[Action, ...]  # body: forward, from iteration 0 to the highest but one
    middle: tuple[Action, ...]  # the highest iteration, and tasks above the iterations
    backward_body: tuple[Action, ...]  # body: backward, down to iteration 1, with reductions of the iteration above
    epilogue: tuple[Action, ...]  # backward, of iteration 0 and below, and the remaining reductions
    reduction_body: tuple[Action, ...]  # body: reductions after the backward pass, from the highest iteration to 0
    last_reductions: tuple[Action, ...]  # reductions below the iterations, after those

    def without_reductions(self) -> "ScannedSchedule":
        """The same schedule without reductions: gradients stay local to each device."""
        parts = [name for name in self._fields if name != "blocks"]
        bare: dict[str, Any] = {name: tuple(t for t in getattr(self, name) if not is_reduction(t)) for name in parts}
        return self._replace(**bare)

    def actions(self) -> tuple[Action, ...]:
        """The tasks of all iterations, one after another."""
        count, size = self.blocks.count, self.blocks.size

        def run(body: Iterable[Action], iterations: Iterable[int]) -> Iterator[Action]:
            for iteration in iterations:
                for action in body:
                    # gathers for the backward pass are named like the blocks of the iteration that runs them
                    below = is_param_gather(action) and action.part == 1
                    yield action._replace(block=action.block + (iteration - below) * size)

        return (
            *self.prologue,
            *run(self.forward_body, range(count - 1)),
            *self.middle,
            *run(self.backward_body, reversed(range(1, count - 1))),
            *self.epilogue,
            *run(self.reduction_body, reversed(range(count))),
            *self.last_reductions,
        )


def make_scanned(
    policy: str,
    shape: StepShape,
    blocks: ScannedBlocks,
    seconds: Seconds,
    stream_of: StreamOf = three_streams,
    gathers_early: bool = False,
) -> tuple[Schedule, ScannedSchedule]:
    """Order a step whose equal blocks run in scans. Returns the whole list of tasks, and its parts.

    Arguments are those of `make_schedule`, the blocks of the scan, and whether its iterations have memory for the next
    one's parameters besides their own (`gathers_early`). The order is that of a model with two iterations: the lower
    one stands for all iterations that have one above them, the upper one for the highest. Raises ScheduleError.
    """
    more = blocks.size * (blocks.count - 2)

    def in_whole(action: Action) -> Action:
        return action if action.block < blocks.first + blocks.size else action._replace(block=action.block + more)

    short = _two_iterations(replace(shape, param_gather="none"), blocks)
    issued = make_schedule(policy, short, lambda action: seconds(in_whole(action)), stream_of).actions
    tasks = [in_whole(action) for action in issued if not is_reduction(action)]
    forward = [task for task in tasks if task.direction == "F"]
    backward = [task for task in tasks if task.direction != "F"]
    sums, gathers = list(itertools.chain.from_iterable(reductions_by_owner(shape))), _gathers(shape, blocks)

    def of(tasks: Sequence[Action], *wanted: int) -> list[Action]:
        return [task for task in tasks if blocks.iteration_of(task) in wanted]

    def filled(tasks: list[Action], part: str, reductions: list[Action]) -> tuple[Action, ...]:
        more = [*gathers.get(part, []), *reductions]
        if not more:
            return tuple(tasks)
        is_body = part in ("forward_body", "backward_body")
        own = {
            task: _in_body(needs[task], task, tasks, shape, blocks, gathers_early) if is_body else needs[task]
            for task in [*tasks, *more]
        }
        return _with_more(tasks, more, own, seconds, stream_of)

    highest, above = blocks.count - 1, blocks.count
    top = of(forward, highest, above) + of(backward, highest, above)
    down, end = of(backward, 0), of(backward, 0, -1)
    at_end = shape.grad_reduce == "end"
    passes = (*of(forward, -1, 0), *top, *end)
    needs = needs_with_release(shape, (task for task in passes if stream_of(task) == Stream.COMPUTE))
    scanned = ScannedSchedule(
        blocks=blocks,
        prologue=filled(of(forward, -1), "prologue", []),
        forward_body=filled(of(forward, 0), "forward_body", []),
        middle=filled(top, "middle", [] if at_end else of(sums, above)),
        backward_body=filled(down, "backward_body", [] if at_end else of(sums, 1)),
        epilogue=(*filled(end, "epilogue", [] if at_end else of(sums, 1, 0, -1)), *(of(sums, above) if at_end else ())),
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


def _gathers(shape: StepShape, blocks: ScannedBlocks) -> dict[str, list[Action]]:
    """The gathers of parameters in each part of a scanned step. Scan bodies gather for the next iteration."""
    parts: dict[str, list[Action]] = defaultdict(list)
    for gather in shape.param_gathers:
        iteration, is_backward = blocks.iteration_of(gather), gather.part == 1
        match iteration:
            case -1:
                parts["epilogue" if is_backward else "prologue"].append(gather)
            case 0 if not is_backward:
                parts["prologue"].append(gather)
                parts["forward_body"].append(gather._replace(block=gather.block + blocks.size))
            case 0:
                parts["backward_body"].append(gather)  # named like the blocks of the iteration that runs it
            case _ if iteration == blocks.count or (is_backward and iteration >= blocks.count - 2):
                parts["middle"].append(gather)
    return parts


def _in_body(
    needs: frozenset[Action],
    task: Action,
    tasks: Sequence[Action],
    shape: StepShape,
    blocks: ScannedBlocks,
    gathers_early: bool,
) -> frozenset[Action]:
    """What a task of a scan body waits for. The iteration before has gathered its parameters; it gathers those of the
    next one.

    The next parameters get the memory of this iteration's own, so with "prefetch" a gather waits for the last task that
    computes with these: a gather that is earlier needs other memory, and compilers copy it at the iteration's end. That
    is cheap beside a gather between nodes, so with `gathers_early` it waits for nothing. With "block" it waits for all
    tasks.
    """
    if not is_param_gather(task):
        return frozenset(need for need in needs if not is_param_gather(need))
    if shape.param_gather == "block":
        return frozenset(tasks)
    if gathers_early:
        return frozenset()
    own = task.block if task.part else task.block - blocks.size
    users = (user for user in tasks if user.direction in ("F", "B"))
    return frozenset(user for user in users if (user.op, user.block) == (task.op, own))


def _with_more(
    tasks: Sequence[Action], more: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf
) -> tuple[Action, ...]:
    """Place gathers of parameters and reductions between `tasks` where no exchange is ready. Dependencies outside of
    these are complete.
    """
    inside = {*tasks, *more}
    needs_inside = {task: needs[task] & inside for task in inside}
    place = {task: i for i, task in enumerate(tasks)}
    by_readiness = sorted(more, key=lambda task: max((place.get(need, -1) for need in needs_inside[task]), default=-1))
    return tuple(fill_gaps([*tasks, *by_readiness], needs_inside, seconds, stream_of))
