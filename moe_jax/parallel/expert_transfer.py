"""Experts that change places between ranks: what they are made of goes from device to device, inside `shard_map`.

P expert ranks, L slots of each, R rows of a stack of blocks on this pipeline stage, S stages, n trips at most.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.parallel.mesh import Axes, Axis
from moe_jax.parallel.permute import permuted

Leaves = list[jax.Array]  # [R, L, …]
Index = jax.Array | np.ndarray


class PhysicalSlot(NamedTuple):
    """Of the expert that each rank sends one way; any where it has none to send. Half way around, down is as up."""

    row: Int[Array | np.ndarray, "*nSP"]
    slot: Int[Array | np.ndarray, "*nSP"]  # of the rank's own
    gets: Bool[Array | np.ndarray, "*nSP"]  # whether what comes the other way is put there


class TransferRounds(NamedTuple):
    """The first `made` of n: in each, all ranks send an expert `shift` ranks up and one as many down.

    Half way around, both ways are one: what is to go down goes up.
    """

    made: Int[Array | np.ndarray, ""]
    shift: Int[Array | np.ndarray, " n"]
    up: PhysicalSlot
    down: PhysicalSlot


def encode(
    trips: Sequence[tuple[int, Sequence[tuple[int, int, int, int, bool, bool]]]],
    most: int,
    stages: int,
    ranks: int,
    held: int,
) -> TransferRounds:
    """At most `most` trips as arrays: each a shift, and moves of [stage, row, slot, slot, whether the first, and
    whether the second gets what the other one holds], slots among all ranks'."""
    shift, size = np.ones(most, np.int32), (most, stages, ranks)
    up, down = (
        PhysicalSlot(np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.bool_)) for _ in range(2)
    )
    for number, (distance, moves) in enumerate(trips):
        shift[number] = distance
        for stage, row, first, second, first_gets, second_gets in moves:
            other = up if 2 * distance == ranks else down
            for way, slot, gets in ((up, first, first_gets), (other, second, second_gets)):
                place = number, stage, slot // held
                way.row[place], way.slot[place], way.gets[place] = row, slot % held, gets
        if 2 * distance == ranks:
            down.row[number], down.slot[number] = up.row[number], up.slot[number]
    return TransferRounds(np.asarray(len(trips), np.int32), shift, up, down)


def migrate(leaves: Leaves, trips: TransferRounds, axis: Axes) -> Leaves:
    """The leaves of stacks of experts once all trips are made; all of one type.

    In each trip a rank sends two experts, or one half way around, whether anybody is to have them or not.
    """
    ranks = jax.lax.axis_size(axis)
    here = jax.lax.axis_index(Axis.PIPELINE), jax.lax.axis_index(axis)
    ways = [partial(_send, distance=distance, axis=axis) for distance in range(1, ranks // 2 + 1)]

    def trip(number: jax.Array, leaves: Leaves) -> Leaves:
        up, down = (PhysicalSlot(*(x[number][here] for x in place)) for place in (trips.up, trips.down))
        same = (up.row == down.row) & (up.slot == down.slot)
        sent = taken(leaves, up.row, up.slot), taken(leaves, down.row, down.slot), up.gets, down.gets, same
        # all is read before anything is written, and comes out of a branch, or arrays would be copied
        new_up, new_down = jax.lax.switch(trips.shift[number] - 1, ways, *sent)
        return put(put(leaves, up.row, up.slot, new_up), down.row, down.slot, new_down)

    with jax.named_scope("migrate"):
        return jax.lax.fori_loop(0, trips.made, trip, leaves)


def _send(
    own_up: jax.Array,
    own_down: jax.Array,
    up_gets: jax.Array,
    down_gets: jax.Array,
    same: jax.Array,
    distance: int,
    axis: Axes,
) -> tuple[jax.Array, jax.Array]:
    """What is to lie where the experts lay that went up and down, which may be the `same` one; down is put last."""
    ranks = jax.lax.axis_size(axis)
    up = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
    from_below = permuted(own_up, axis, up)
    if 2 * distance == ranks:
        new = jnp.where(up_gets, from_below, own_up)
        return new, new
    from_above = permuted(own_down, axis, [(there, rank) for rank, there in up])
    new_up = jnp.where(up_gets, from_above, own_up)
    return new_up, jnp.where(down_gets, from_below, jnp.where(same, new_up, own_down))


def taken(leaves: Leaves, row: Index, slot: Index) -> Float[Array, " n"]:
    """All of an expert, flattened."""
    return jnp.concatenate(
        [jax.lax.dynamic_slice(leaf, _start(leaf, row, slot), (1, 1, *leaf.shape[2:])).ravel() for leaf in leaves]
    )


def put(leaves: Leaves, row: Index, slot: Index, expert: Float[Array, " n"]) -> Leaves:
    """The leaves with another expert in a slot."""
    sizes = [leaf[0, 0].size for leaf in leaves]
    parts = jnp.split(expert, np.cumsum(sizes)[:-1].tolist())
    return [
        jax.lax.dynamic_update_slice(leaf, part.reshape(1, 1, *leaf.shape[2:]), _start(leaf, row, slot))
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _start(leaf: jax.Array, row: Index, slot: Index) -> list[Any]:
    return [row, slot, *(0,) * (leaf.ndim - 2)]
