"""Which instructions of a compiled program belong to which task of its schedule, and what the compiler changed.

The training step opens a scope named after each action, and instructions keep their scopes in `op_name`.
"""

import bisect
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moe_jax.measure.costs import collective_of
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.overlap import Collective, ComputeInstruction, Replay
from moe_jax.schedule.actions import NO_BLOCK, Action, ScheduleError, Stream, three_streams
from moe_jax.schedule.schedule import Schedule

Task = TypeVar("Task", ComputeInstruction, Collective)

_SCOPE = re.compile(r"(?:^|[/(])([FBWG]\.[a-z]+(?:\.\d+){1,2})(?=[/)]|$)")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A schedule held against the program that was made of it."""

    num_tasks: int  # of the schedule
    instructions: dict[Action, tuple[str, ...]]  # of each action that left any, by name
    missing: tuple[Action, ...]  # communication of the schedule that has no collective
    merged: tuple[tuple[Action, ...], ...]  # actions that share one collective
    split: dict[Action, int]  # communication of several collectives
    moved: tuple[Action, ...]  # communication issued out of the schedule's order: the fewest that explain it
    products: dict[Action, int]  # matrix products of compute tasks


def action_of(op_name: str) -> Action | None:
    """The task that scopes belong to: backward tasks hold the scopes of forward ones, so the outermost."""
    for name in _SCOPE.findall(op_name):
        try:
            return Action.parse(name)
        except ScheduleError:  # another scope that looks like one
            continue
    return None


def name_iterations(replay: Replay, schedule: Schedule) -> Replay:
    """The same with the tasks of all iterations of a loop named as the schedule names them.

    Inside a loop over blocks, scopes have the names of its lowest iteration, which comes first forward and last backward.
    """
    inside = [task.op_name for task in replay.compute if task.iterations > 1]
    name_of = iteration_names(schedule, filter(None, map(action_of, inside)))

    def rename(task: Task) -> Task:
        action = action_of(task.op_name)
        named = name_of(action, task.iteration, task.iterations) if action and task.iterations > 1 else None
        if named is None:
            return task
        return dataclasses.replace(
            task, op_name=task.op_name.replace(str(action), str(named), 1), iteration=0, iterations=1
        )

    return dataclasses.replace(
        replay,
        compute=tuple(map(rename, replay.compute)),
        collectives=tuple(map(rename, replay.collectives)),
    )


def iteration_names(schedule: Schedule, inside: Iterable[Action]) -> Callable[[Action, int, int], Action | None]:
    """A function from an action inside loops over blocks, its iteration and their number to the schedule's name for it.

    It knows none for actions of other loops. `inside` are all actions in loops.
    """
    known = set(schedule.actions)
    size = len({action.block for action in inside if action.direction == "F" and action.block != NO_BLOCK})

    def name_of(action: Action, iteration: int, iterations: int) -> Action | None:
        if action.block == NO_BLOCK:
            return None
        named = action._replace(
            block=action.block + size * (iteration if action.direction == "F" else iterations - 1 - iteration)
        )
        return named if named in known else None

    return name_of


def match(schedule: Schedule, program: HloModule, replay: Replay) -> Match:
    """Hold a schedule against its program, whose iterations have their names (`name_iterations`)."""
    instructions: dict[Action, list[str]] = defaultdict(list)
    products = dict.fromkeys((a for a in schedule.actions if three_streams(a) == Stream.COMPUTE), 0)
    for task in replay.compute:
        if action := action_of(task.op_name):
            instructions[action].append(task.instruction.name)
            if action in products:
                products[action] += task.products
    parts = _parts_of(program)
    actions_of = []
    for transfer in replay.collectives:
        if transfer.iteration:  # of a loop over something else than blocks, where one iteration is enough
            continue
        own = action_of(transfer.op_name)
        actions_of.append(list(dict.fromkeys(filter(None, [own, *parts[transfer.instruction.name]]))))
        for action in actions_of[-1]:
            instructions[action].append(transfer.instruction.name)
    planned = [action for action in schedule.actions if three_streams(action) != Stream.COMPUTE]
    counts = {action: sum(action in actions for actions in actions_of) for action in planned}
    return Match(
        num_tasks=len(schedule.actions),
        instructions={action: tuple(lines) for action, lines in instructions.items()},
        missing=tuple(action for action in planned if not counts[action]),
        merged=tuple(tuple(actions) for actions in actions_of if len(actions) > 1),
        split={action: count for action, count in counts.items() if count > 1},
        moved=tuple(_moved(planned, [action for actions in actions_of for action in actions])),
        products=products,
    )


def _parts_of(program: HloModule) -> dict[str, list[Action]]:
    """The other actions that each collective does the work of: those of the parts that its result is cut into."""
    parts: dict[str, list[Action]] = defaultdict(list)
    source: dict[str, tuple[str, Action | None]] = {}  # start, done or update → the collective itself, and its action
    for line in program.by_name.values():
        origin = source.get(line.operands[0]) if line.operands else None
        if origin and line.opcode.endswith(("-done", "-update")):
            source[line.name] = origin
        elif origin and _takes_part(line, program):
            name, own = origin
            if (action := action_of(program.op_name(line))) and action != own:
                parts[name].append(action)
        elif not line.is_control and (collective := collective_of(line, program)):
            source[line.name] = collective.name, action_of(program.op_name(collective) or program.op_name(line))
    return parts


def _takes_part(line: Instruction, program: HloModule) -> bool:
    """Whether an instruction only takes a part of its operand: so a merge is undone, under the names of its parts."""
    last = program.computations[line.called[0]][-1] if line.opcode == "fusion" else line
    return last.opcode in ("get-tuple-element", "slice", "dynamic-slice", "bitcast")


def _moved(planned: Sequence[Action], issued: Iterable[Action]) -> list[Action]:
    """The fewest actions whose removal leaves the rest in the planned order."""
    place = {action: i for i, action in enumerate(planned)}
    order = list(dict.fromkeys(action for action in issued if action in place))
    tails: list[int] = []  # the smallest last place of an increasing run of each length
    run_length = []
    for action in order:
        length = bisect.bisect_left(tails, place[action])
        tails[length : length + 1] = [place[action]]
        run_length.append(length)
    moved, wanted, limit = [], len(tails) - 1, len(place)
    for action, length in zip(reversed(order), reversed(run_length), strict=True):
        if length == wanted and place[action] < limit:
            wanted, limit = wanted - 1, place[action]
        else:
            moved.append(action)
    return moved[::-1]
