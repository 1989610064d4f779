"""A table of ticks as arrays, from which every stage reads what it does."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_jax.schedule.pipelines.dependencies import activation_from, gradient_from
from moe_jax.schedule.pipelines.memory import Slots
from moe_jax.schedule.pipelines.table import DIRECTIONS, ChunkPass, Table, TableTask

PASS_SCOPE = "pass_"  # around a pass in the program, in front of its name


class TickPass(NamedTuple):
    """One direction of every tick; arrays [ticks, stages]. Of a tick without this direction only `runs` counts.

    Arrays of numpy when a table is made, of jax inside a step, and single numbers when a tick is filled in.
    """

    runs: Any  # 1: it does, 0: it does not
    microbatch: Any
    chunk: Any
    structure: Any  # of the chunk's blocks: a number of `Stages`
    at_end: Any  # 1: of the lowest blocks
    at_loss: Any  # 1: of the highest blocks
    saved: Any  # slots of buffers, see `schedule.pipelines.memory`
    weight: Any
    received: Any


class Row(NamedTuple):
    """What happens in a tick: passes, and arrivals."""

    forward: TickPass
    backward: TickPass
    weight: TickPass
    activation_to: Any  # the slot for what the stage before computes in this tick, received at its end
    activation_part: Any  # [ticks, stages, 2]: whether this stage sends what it computes in this tick, and receives
    gradient_to: Any  # for what the stage behind computed in the tick before, or in this one
    gradient_part: Any  # whether this stage sends what it computes in this tick, and receives what comes in the next


def rows_of(table: Table, slots: Slots, structure_of: Callable[[int, int], int], gradients_at_end: bool = False) -> Row:
    """The table's arrays. `structure_of(stage, chunk)` numbers the structures of model chunks.

    With `gradients_at_end` a tick also receives gradients of its own at its end, else in the next one.

    The slot behind the last one of received activations, and of gradients, takes what nobody waits for, and what a
    stage at either end of the model receives from itself.
    """
    nothing_x, nothing_dx = slots.activations.num_slots, slots.gradients.num_slots
    shape = (len(table.ticks), table.stages)
    passes = {direction: TickPass(*(np.zeros(shape, np.int32) for _ in TickPass._fields)) for direction in DIRECTIONS}
    activation_to, gradient_to = np.full(shape, nothing_x, np.int32), np.full(shape, nothing_dx, np.int32)
    tick_of: Mapping[TableTask, int] = {task: tick for tick, task in table.tasks()}
    for task, tick in tick_of.items():
        direction, stage, work = task
        key, chunks = (stage, work), table.chunks
        received = {"F": slots.activations.slot.get(key, nothing_x), "B": slots.gradients.slot.get(key, nothing_dx)}
        values = TickPass(
            runs=1,
            microbatch=work.microbatch,
            chunk=work.chunk,
            structure=structure_of(stage, work.chunk),
            at_end=_is_lowest(stage, work),
            at_loss=stage == table.stages - 1 and work.chunk == chunks - 1,
            saved=slots.saved.slot[key],
            weight=slots.weight.slot.get(key, 0),
            received=received.get(direction, 0),
        )
        for array, value in zip(passes[direction], values, strict=True):
            array[tick, stage] = value
        if direction == "F" and (sender := activation_from(task, table.stages)):
            activation_to[tick_of[sender], stage] = slots.activations.slot[key]
        if direction == "B" and (sender := gradient_from(task, table.stages, chunks)):
            gradient_to[tick_of[sender] + (not gradients_at_end), stage] = slots.gradients.slot[key]
    activations = activation_to != nothing_x
    gradients = gradient_to != nothing_dx
    if not gradients_at_end:
        gradients = np.roll(gradients, -1, axis=0)  # nobody receives any in the first tick
    return Row(
        passes["F"],
        passes["B"],
        passes["W"],
        activation_to,
        np.stack([np.roll(activations, -1, axis=1), activations], axis=-1),
        gradient_to,
        np.stack([np.roll(gradients, 1, axis=1), gradients], axis=-1),
    )


def _is_lowest(stage: int, work: ChunkPass) -> bool:
    return stage == 0 and work.chunk == 0
