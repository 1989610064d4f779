"""Deep models: equal groups of blocks that loops run, all turns of a loop by the same list of tasks.

A loop's turn ends before the next one starts, so what a schedule overlaps lies inside one turn; only reductions cross:
each turn sums the gradients of the turn above it, which are complete.
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

_FEWEST = 3  # turns that a loop is worth: the highest one's backward pass stands outside


@dataclass(frozen=True)
class Turns:
    """`count` turns of `size` blocks each, from block `first` up; all turns have the same kinds of blocks."""

    first: int
    size: int
    count: int

    @classmethod
    def of(cls, first: int, period: int, repeats: int, unroll: int) -> "Turns | None":
        """For `repeats` equal periods of blocks, `unroll` of them in a turn; None if a loop would not shorten that.

        Periods that fill no turn are left over at the top.
        """
        count = repeats // unroll
        return cls(first, period * unroll, count) if count >= _FEWEST else None

    @property
    def last(self) -> int:
        """The block behind the highest turn."""
        return self.first + self.size * self.count

    def turn_of(self, action: Action) -> int:
        """The turn that a task belongs to; -1 below all turns, `count` above."""
        if action.op in ("head", "counts"):
            return self.count
        return min(max((action.block - self.first) // self.size, -1), self.count)


class ScannedSchedule(NamedTuple):
    """A step in the order of issue. Bodies of loops are named as turn 0 runs them."""

    turns: Turns
    bottom: tuple[Action, ...]  # forward, below the turns
    up: tuple[Action, ...]  # body: forward, from turn 0 to the highest
    top: tuple[Action, ...]  # what is above the turns, and the backward pass of the highest turn
    down: tuple[Action, ...]  # body: backward, to turn 0; reductions are those of the turn above
    end: tuple[Action, ...]  # backward, below the turns, and reductions that are still to be done
    sums: tuple[Action, ...]  # body: reductions behind the backward pass, from the highest turn to turn 0
    rest: tuple[Action, ...]  # reductions below the turns, behind those

    def without_reductions(self) -> "ScannedSchedule":
        """The same with gradients left as they are on each device."""
        kept = (tuple(action for action in part if not is_reduction(action)) for part in self[1:])
        return ScannedSchedule(self.turns, *kept)

    def actions(self) -> tuple[Action, ...]:
        """The tasks of all turns, one after another."""
        count, size = self.turns.count, self.turns.size

        def run(body: Iterable[Action], turns: Iterable[int]) -> Iterator[Action]:
            return (action._replace(block=action.block + turn * size) for turn in turns for action in body)

        return (
            *self.bottom,
            *run(self.up, range(count)),
            *self.top,
            *run(self.down, reversed(range(count - 1))),
            *self.end,
            *run(self.sums, reversed(range(count))),
            *self.rest,
        )


def make_looped(
    policy: str, shape: StepShape, turns: Turns, seconds: Seconds, stream_of: StreamOf = three_streams
) -> tuple[Schedule, ScannedSchedule]:
    """Order a step whose blocks of equal kinds run in loops: the whole list, and its parts. As `make_schedule`.

    The order is that of a model with two turns: its lower one stands for all that have one above, its upper one for
    the highest. Raises ScheduleError.
    """
    more = turns.size * (turns.count - 2)

    def in_whole(action: Action) -> Action:
        return action if action.block < turns.first + turns.size else action._replace(block=action.block + more)

    issued = make_schedule(
        policy, _two_turns(shape, turns), lambda action: seconds(in_whole(action)), stream_of
    ).actions
    tasks = [in_whole(action) for action in issued if not is_reduction(action)]
    forward = [task for task in tasks if task.direction == "F"]
    backward = [task for task in tasks if task.direction != "F"]
    sums = all_reductions(shape)
    needs = task_graph(shape)

    def of(tasks: Sequence[Action], *wanted: int) -> list[Action]:
        return [task for task in tasks if turns.turn_of(task) in wanted]

    def filled(tasks: list[Action], reductions: list[Action]) -> tuple[Action, ...]:
        return _with_reductions(tasks, reductions, needs, seconds, stream_of) if reductions else tuple(tasks)

    highest, above = turns.count - 1, turns.count
    top = of(forward, above) + of(backward, highest, above)
    down, end = of(backward, 0), of(backward, -1)
    at_end = shape.grad_reduce == "end"
    looped = ScannedSchedule(
        turns=turns,
        bottom=tuple(of(forward, -1)),
        up=tuple(of(forward, 0)),
        top=tuple(top) if at_end else filled(top, of(sums, above)),
        down=tuple(down) if at_end else filled(down, of(sums, 1)),
        end=(*end, *of(sums, above)) if at_end else filled(end, of(sums, 0, -1)),
        sums=tuple(of(sums, 0)) if at_end else (),
        rest=tuple(of(sums, -1)) if at_end else (),
    )
    return Schedule(policy, shape, looped.actions()), looped


def _two_turns(shape: StepShape, turns: Turns) -> StepShape:
    """The same with two turns."""
    below, above = turns.first + 2 * turns.size, turns.last
    return replace(
        shape,
        kinds=shape.kinds[:below] + shape.kinds[above:],
        reductions=shape.reductions[: 1 + below] + shape.reductions[1 + above :],
    )


def _with_reductions(
    tasks: Sequence[Action], reductions: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf
) -> tuple[Action, ...]:
    """Tasks and reductions between them, where no exchange is ready; what they need from elsewhere has been done."""
    inside = {*tasks, *reductions}
    needs_inside = {task: needs[task] & inside for task in inside}
    place = {task: i for i, task in enumerate(tasks)}
    by_readiness = sorted(reductions, key=lambda task: max((place[need] for need in needs_inside[task]), default=-1))
    return tuple(fill_gaps([*tasks, *by_readiness], needs_inside, seconds, stream_of))
