"""Counts of equal ticks in a table. Times and memory of a step in lock-step depend on these alone."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_jax.schedule.pipelines.build import make_table
from moe_jax.schedule.pipelines.memory import slot_counts
from moe_jax.schedule.pipelines.table import StageTick, Table

_ROUNDS = 3  # of as many microbatches as there are stages; after them a table repeats itself


class StagePasses(NamedTuple):
    """The model chunk of each pass of a slot, without its microbatch; None: no such pass."""

    forward: int | None
    backward: int | None
    weight: int | None


class Outline(NamedTuple):
    """The ticks and the buffers of a table."""

    ticks: Mapping[tuple[StagePasses, ...], int]  # how often each occurs; a tick is the passes of every stage
    has_pairs: bool  # whether ticks have both a forward and a backward pass
    saved: int  # slots of buffers, see `schedule.pipelines.memory`
    weight: int
    activations: int
    gradients: int


@functools.lru_cache(maxsize=512)
def outline_of(name: str, stages: int, microbatches: int, chunks: int = 1) -> Outline:
    """The outline of a schedule's table. Long tables repeat themselves and are extrapolated. Raises ScheduleError."""
    further = max(microbatches - 1, 0) // stages - _ROUNDS
    if further <= 0:
        return _outline(make_table(name, stages, microbatches, chunks))
    before, last = (outline_of(name, stages, microbatches - (further + more) * stages, chunks) for more in (1, 0))
    ticks = {tick: count + further * (count - before.ticks.get(tick, 0)) for tick, count in last.ticks.items()}
    slots = (most + further * (most - fewer) for most, fewer in zip(last[2:], before[2:], strict=True))
    return Outline(ticks, last.has_pairs, *slots)


class TickSlots(NamedTuple):
    """The slots of an outline's ticks, each distinct one once. T ticks, S stages."""

    slots: tuple[tuple[int, StagePasses], ...]  # a stage and its passes
    index_TS: npt.NDArray[np.intp]  # of each slot in `slots`


@functools.lru_cache(maxsize=512)
def tick_slots(name: str, stages: int, microbatches: int, chunks: int = 1) -> TickSlots:
    """The slots of `outline_of` with these arguments."""
    places: dict[tuple[int, StagePasses], int] = {}
    index = [
        [places.setdefault(slot, len(places)) for slot in enumerate(tick)]
        for tick in outline_of(name, stages, microbatches, chunks).ticks
    ]
    return TickSlots(tuple(places), np.array(index, np.intp))


def _outline(table: Table) -> Outline:
    ticks = Counter(tuple(map(_passes, tick)) for tick in table.ticks)
    return Outline(ticks, table.has_pairs, *slot_counts(table))


def _passes(slot: StageTick) -> StagePasses:
    return StagePasses(*[None if work is None else work.chunk for work in slot])
