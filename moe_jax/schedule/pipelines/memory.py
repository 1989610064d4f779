"""What a table keeps in memory: activations in flight, and the buffers that hold them."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from moe_jax.schedule.pipelines.dependencies import activation_from, gradient_from
from moe_jax.schedule.pipelines.table import ChunkPass, Table, TableTask


class Buffers(NamedTuple):
    """Buffers of equal size on every stage, and which of them holds what."""

    slot: Mapping[tuple[int, ChunkPass], int]  # of (stage, work)
    num_slots: int  # the largest count of a stage


class Slots(NamedTuple):
    """Where everything that outlives a tick is kept. A slot is written again only behind the tick of its last use."""

    saved: Buffers  # what F saved: from the tick of F to that of W where it is split, else of B
    weight: Buffers  # what B leaves to W: from the tick of B to that of W; empty where W is not split
    activations: Buffers  # received by F: from the tick behind the sender's to that of F
    gradients: Buffers  # received by B: likewise


class _Life(NamedTuple):
    """Both ticks included."""

    first: int
    last: int


_Lives = dict[tuple[int, ChunkPass], _Life]


def in_flight(table: Table, until: str | None = None) -> tuple[int, ...]:
    """The most (microbatch, chunk) activations that each stage holds in one tick.

    From the start of F to the end of `until`: B or W; None is W where it is split, else B.
    """
    lives = _saved(table, until or _last(table))
    return tuple(_most_at_once(_of_stage(lives, stage).values()) for stage in range(table.stages))


def slots_of(table: Table) -> Slots:
    """A static place for everything that outlives a tick, with as few slots as possible."""
    ran = _ran(table)
    activations: _Lives = {}
    gradients: _Lives = {}
    weight: _Lives = {}
    for task, tick in ran.items():
        key = (task.stage, task.work)
        if task.direction == "F" and (sender := activation_from(task, table.stages)):
            activations[key] = _Life(ran[sender] + 1, tick)
        if task.direction == "B" and (sender := gradient_from(task, table.stages, table.chunks)):
            gradients[key] = _Life(ran[sender] + 1, tick)
        if task.direction == "W":
            weight[key] = _Life(ran[task._replace(direction="B")], tick)
    lives = (_saved(table, _last(table)), weight, activations, gradients)
    return Slots(*(_place(each, table.stages) for each in lives))


def _last(table: Table) -> str:
    return "W" if table.split_weight_grad else "B"


def _ran(table: Table) -> dict[TableTask, int]:
    return {task: tick for tick, task in table.tasks()}


def _saved(table: Table, until: str) -> _Lives:
    ran = _ran(table)
    return {
        (task.stage, task.work): _Life(tick, ran[task._replace(direction=until)])
        for task, tick in ran.items()
        if task.direction == "F"
    }


def _of_stage(lives: _Lives, stage: int) -> dict[ChunkPass, _Life]:
    return {work: life for (owner, work), life in lives.items() if owner == stage}


def _most_at_once(lives: Iterable[_Life]) -> int:
    changes = [change for life in lives for change in ((life.first, 1), (life.last + 1, -1))]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _place(lives: _Lives, stages: int) -> Buffers:
    """The lowest free slot in the order of first ticks: no more slots than are needed at once."""
    slot: dict[tuple[int, ChunkPass], int] = {}
    num_slots = 0
    for stage in range(stages):
        free_from: list[int] = []  # the tick from which each slot is free
        for work, life in sorted(_of_stage(lives, stage).items(), key=lambda item: (item[1], item[0])):
            free = next((i for i, tick in enumerate(free_from) if tick <= life.first), len(free_from))
            free_from[free : free + 1] = [life.last + 1]
            slot[stage, work] = free
        num_slots = max(num_slots, len(free_from))
    return Buffers(slot, num_slots)
