"""Assign instructions of a compiled program to the tasks of its schedule, and find what the compiler changed.

The training step opens a named scope for each action, and instructions keep their scopes in `op_name`.
"""

import bisect
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moe_jax.measure.costs import collective_of, fused_part
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.overlap import Collective, ComputeInstruction, Replay
from moe_jax.schedule.actions import NO_BLOCK, Action, ScheduleError, Stream, is_param_gather, three_streams
from moe_jax.schedule.schedule import Schedule

Task = TypeVar("Task", ComputeInstruction, Collective)

_SCOPE = re.compile(r"(?:^|[/(])([FBWPG]\.[a-z]+(?:\.\d+){1,2})(?=[/)]|$)")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A schedule compared with the program compiled from it."""

    num_tasks: int  # in the schedule
    instructions: dict[Action, tuple[str, ...]]  # names of the instructions of each action that has any
    missing: tuple[Action, ...]  # communication actions without a collective
    merged: tuple[tuple[Action, ...], ...]  # actions that share one collective
    split: dict[Action, int]  # communication actions with several collectives
    moved: tuple[Action, ...]  # communication issued out of order: the smallest set that explains it
    products: dict[Action, int]  # number of matrix products of compute tasks


def action_of(op_name: str) -> Action | None:
    """Return the task of an `op_name`: the outermost, since scopes of backward tasks contain those of forward tasks."""
    for name in _SCOPE.findall(op_name):
        try:
            return Action.parse(name)
        except ScheduleError:  # another scope that looks like an action
            continue
    return None


def name_iterations(replay: Replay, schedule: Schedule) -> Replay:
    """Return the replay with the tasks of all loop iterations named as in the schedule.

    Inside a loop over blocks, scopes have the names of its lowest iteration, which runs first in the forward loop and
    last in the backward loop.
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
    """Return a function from an action in a loop over blocks, its iteration and the number of iterations to the
    schedule's name for it.

    The function returns None for actions of other loops. `inside` are all actions in loops.
    """
    known = set(schedule.actions)
    size = len({action.block for action in inside if action.direction == "F" and action.block != NO_BLOCK})

    def name_of(action: Action, iteration: int, iterations: int) -> Action | None:
        if action.block == NO_BLOCK:
            return None
        goes_up = action.direction == "F" or (is_param_gather(action) and action.part == 0)
        named = action._replace(block=action.block + size * (iteration if goes_up else iterations - 1 - iteration))
        if is_param_gather(action) and (not goes_up or named not in known):  # for the next iteration
            named = named._replace(block=named.block - size, part=1)
        return named if named in known else None

    return name_of


def match(schedule: Schedule, program: HloModule, replay: Replay) -> Match:
    """Compare a schedule with its program, whose iterations are named as in the schedule (`name_iterations`)."""
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
        if transfer.iteration:  # a loop that is not over blocks: one iteration is enough
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
    """Return the other actions that each merged collective serves: those of the parts into which its result
    is split.
    """
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
        elif fused_part(line, program):  # its other results are those of another task
            continue
        elif not line.is_control and (collective := collective_of(line, program)):
            source[line.name] = collective.name, action_of(program.op_name(collective) or program.op_name(line))
    return parts


_PARTS = ("get-tuple-element", "slice", "dynamic-slice", "bitcast")  # operations that only take a part


def _takes_part(line: Instruction, program: HloModule) -> bool:
    """Whether an instruction only takes a part of its operand. This is how a merge is undone, under the names of its
    parts. A fusion's other operands may only be there to order it.
    """
    if line.opcode != "fusion":
        return line.opcode in _PARTS
    fused = program.computations[line.called[0]]
    last, by_name = fused[-1], {each.name: each for each in fused}
    taken = last
    while taken.opcode != "parameter" and taken.operands and taken.operands[0] in by_name:
        taken = by_name[taken.operands[0]]
    return last.opcode in _PARTS and taken.opcode == "parameter" and taken.operands == ("0",)


def _moved(planned: Sequence[Action], issued: Iterable[Action]) -> list[Action]:
    """Return the smallest set of actions whose removal leaves the rest in the planned order."""
    place = {action: i for i, action in enumerate(planned)}
    order = list(dict.fromkeys(action for action in issued if action in place))
    tails: list[int] = []  # by length of an increasing run: its smallest last place
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
