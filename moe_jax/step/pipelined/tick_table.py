"""Convert a table of ticks to arrays, from which every stage reads its passes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_jax.schedule.pipelines.dependencies import activation_from, gradient_from
from moe_jax.schedule.pipelines.memory import Slots
from moe_jax.schedule.pipelines.table import DIRECTIONS, ChunkPass, Table, TableTask

PASS_SCOPE = "pass_"  # prefix of the named scope around a pass


class TickPass(NamedTuple):
    """One direction of every tick; arrays [ticks, stages]. If a tick has no pass in this direction, only `runs` is
    meaningful.

    The arrays are numpy's when a table is built, jax's inside a step, and single numbers when a tick is filled in.
    """

    runs: Any  # 1: the pass runs, 0: it does not
    microbatch: Any
    chunk: Any
    structure: Any  # number of the structure of the chunk's blocks
    at_end: Any  # 1: the chunk has the lowest block
    at_loss: Any  # 1: the chunk has the highest block
    saved: Any  # slots of buffers, see `schedule.pipelines.memory`
    weight: Any
    received: Any


class TickRow(NamedTuple):
    """The passes and transfers of a tick."""

    forward: TickPass
    backward: TickPass
    weight: TickPass
    activation_to: Any  # the slot for what the previous stage computes in this tick, received at its end
    activation_part: Any  # [ticks, stages, 2]: whether this stage sends its result of this tick, and receives
    gradient_to: Any  # the slot for what the next stage computed in the previous tick, or in this one
    gradient_part: Any  # whether this stage sends its result of this tick, and receives in the next


def rows_of(
    table: Table, slots: Slots, structure_of: Callable[[int, int], int], gradients_at_end: bool = False
) -> TickRow:
    """Return the table's arrays. `structure_of(stage, chunk)` is the number of a model chunk's structure.

    With `gradients_at_end`, a tick also receives its own gradients at its end, else in the next tick.

    Received activations and gradients each have one extra slot at the end, for values that no stage waits for, and for
    what a stage at either end of the model receives from itself.
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
        gradients = np.roll(gradients, -1, axis=0)  # no stage receives any in the first tick
    return TickRow(
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
