"""Memory that a table needs: the activations in flight, and the buffers that store them."""

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from moe_jax.schedule.pipelines.dependencies import activation_from, gradient_from
from moe_jax.schedule.pipelines.table import ChunkPass, Table, TableTask


class Buffers(NamedTuple):
    """Buffers of equal size on every stage, and the buffer of each value."""

    slot: Mapping[tuple[int, ChunkPass], int]  # by (stage, work)
    num_slots: int  # the largest number that a stage needs


class Slots(NamedTuple):
    """Buffers for all values that outlive a tick. A slot is overwritten only after the tick of its last use."""

    saved: Buffers  # saved by F: from the tick of F to that of W if it is split, else of B
    weight: Buffers  # saved by B for W: from the tick of B to that of W; empty if W is not split
    activations: Buffers  # received by F: from the tick after the sender's to that of F
    gradients: Buffers  # received by B: likewise


class _Lifetime(NamedTuple):
    """The first and the last tick of a value, both included."""

    first: int
    last: int


_Lifetimes = dict[tuple[int, ChunkPass], _Lifetime]


def in_flight(table: Table, until: str | None = None) -> tuple[int, ...]:
    """The largest number of (microbatch, chunk) activations that each stage stores in one tick.

    Activations are stored from the start of F to the end of `until`: B or W; None means W if it is split, else B.
    """
    return _most_at_once(_saved(_ran(table), until or _last(table)), table)


def slots_of(table: Table) -> Slots:
    """Assign a static buffer to every value that outlives a tick, with as few slots as possible."""
    return Slots(*(_assign_slots(each, table.stages) for each in _lifetimes(table)))


def slot_counts(table: Table) -> tuple[int, ...]:
    """The numbers of slots of `slots_of`, in its order: as many as a stage needs at once."""
    return tuple(max(_most_at_once(each, table)) for each in _lifetimes(table))


def _lifetimes(table: Table) -> tuple[_Lifetimes, ...]:
    """The lifetimes of all values, in the order of `Slots`."""
    ran = _ran(table)
    activations: _Lifetimes = {}
    gradients: _Lifetimes = {}
    weight: _Lifetimes = {}
    for task, tick in ran.items():
        key = (task.stage, task.work)
        if task.direction == "F" and (sender := activation_from(task, table.stages)):
            activations[key] = _Lifetime(ran[sender] + 1, tick)
        if task.direction == "B" and (sender := gradient_from(task, table.stages, table.chunks)):
            gradients[key] = _Lifetime(ran[sender] + 1, tick)
        if task.direction == "W":
            weight[key] = _Lifetime(ran[TableTask("B", task.stage, task.work)], tick)
    return _saved(ran, _last(table)), weight, activations, gradients


def _last(table: Table) -> str:
    return "W" if table.split_weight_grad else "B"


def _ran(table: Table) -> dict[TableTask, int]:
    return {task: tick for tick, task in table.tasks()}


def _saved(ran: Mapping[TableTask, int], until: str) -> _Lifetimes:
    return {
        (task.stage, task.work): _Lifetime(tick, ran[TableTask(until, task.stage, task.work)])
        for task, tick in ran.items()
        if task.direction == "F"
    }


def _most_at_once(lifetimes: _Lifetimes, table: Table) -> tuple[int, ...]:
    """The most values that each stage has in one tick."""
    changes = [[0] * (len(table.ticks) + 1) for _ in range(table.stages)]
    for (stage, _), (first, last) in lifetimes.items():
        changes[stage][first] += 1
        changes[stage][last + 1] -= 1
    return tuple(max(accumulate(each)) for each in changes)


def _assign_slots(lifetimes: _Lifetimes, stages: int) -> Buffers:
    """Assign the lowest free slot in the order of first ticks: no more slots than are needed at once."""
    slot: dict[tuple[int, ChunkPass], int] = {}
    num_slots = 0
    by_stage: list[list[tuple[_Lifetime, ChunkPass]]] = [[] for _ in range(stages)]
    for (owner, work), lifetime in lifetimes.items():
        by_stage[owner].append((lifetime, work))
    for stage, values in enumerate(by_stage):
        free_from: list[int] = []  # the tick from which each slot is free
        for lifetime, work in sorted(values):
            free = next((i for i, tick in enumerate(free_from) if tick <= lifetime.first), len(free_from))
            free_from[free : free + 1] = [lifetime.last + 1]
            slot[stage, work] = free
        num_slots = max(num_slots, len(free_from))
    return Buffers(slot, num_slots)
