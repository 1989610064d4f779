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

Leaves = list[jax.Array]  # [R, L, …]


class Place(NamedTuple):
    """Of the expert that each rank sends one way; where it has none to send, that of the other way."""

    row: Int[Array | np.ndarray, "*nSP"]
    slot: Int[Array | np.ndarray, "*nSP"]  # of the rank's own
    exists: Bool[Array | np.ndarray, "*nSP"]  # or else what is sent is nobody's


class Trips(NamedTuple):
    """The first `made` of n: in each, all ranks send an expert `shift` ranks up and one as many down.

    Half way around, both ways are one: what is to go down goes up.
    """

    made: Int[Array | np.ndarray, ""]
    shift: Int[Array | np.ndarray, " n"]
    up: Place
    down: Place


def encode(
    trips: Sequence[tuple[int, Sequence[tuple[int, int, int, int]]]], most: int, stages: int, ranks: int, held: int
) -> Trips:
    """At most `most` trips (shift, swaps of [stage, row, slot, slot] among all ranks') as arrays."""
    shift, size = np.ones(most, np.int32), (most, stages, ranks)
    rows, slots = ([np.zeros(size, np.int32) for _ in range(2)] for _ in range(2))
    exist = [np.zeros(size, np.bool_) for _ in range(2)]
    for number, (distance, swaps) in enumerate(trips):
        shift[number] = distance
        for stage, row, *pair in swaps:
            for way, slot in zip((0, 0 if 2 * distance == ranks else 1), pair, strict=True):
                place = number, stage, slot // held
                rows[way][place], slots[way][place], exist[way][place] = row, slot % held, True
    for numbers in (rows, slots):
        for way, other in ((0, 1), (1, 0)):
            np.copyto(numbers[way], numbers[other], where=~exist[way] & exist[other])
    up, down = (Place(*of_way) for of_way in zip(rows, slots, exist, strict=True))
    return Trips(np.asarray(len(trips), np.int32), shift, up, down)


def migrate(leaves: Leaves, trips: Trips, axis: Axes) -> Leaves:
    """The leaves of stacks of experts once all trips are made; all of one type.

    In each trip a rank sends two experts, or one half way around, whether anybody is to have them or not.
    """
    ranks = jax.lax.axis_size(axis)
    here = jax.lax.axis_index(Axis.PIPELINE), jax.lax.axis_index(axis)
    ways = [partial(_send, distance=distance, axis=axis) for distance in range(1, ranks // 2 + 1)]

    def trip(number: jax.Array, leaves: Leaves) -> Leaves:
        up, down = (Place(*(x[number][here] for x in place)) for place in (trips.up, trips.down))
        sent = _taken(leaves, up), _taken(leaves, down), up.exists, down.exists
        # all is read before anything is written, and comes out of a branch, or arrays would be copied
        new_up, new_down = jax.lax.switch(trips.shift[number] - 1, ways, *sent)
        return _put(_put(leaves, up, new_up), down, new_down)

    with jax.named_scope("migrate"):
        return jax.lax.fori_loop(0, trips.made, trip, leaves)


def _send(
    own_up: jax.Array, own_down: jax.Array, has_up: jax.Array, has_down: jax.Array, distance: int, axis: Axes
) -> tuple[jax.Array, jax.Array]:
    """What is to lie where the experts lay that went up and down."""
    ranks = jax.lax.axis_size(axis)
    up = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
    from_below = jax.lax.ppermute(own_up, axis, up)
    if 2 * distance == ranks:
        new = jnp.where(has_up, from_below, own_up)
        return new, new
    from_above = jax.lax.ppermute(own_down, axis, [(there, rank) for rank, there in up])
    new_up = jnp.where(has_up, from_above, jnp.where(has_down, from_below, own_up))
    return new_up, jnp.where(has_down, from_below, new_up)


def _taken(leaves: Leaves, place: Place) -> Float[Array, " n"]:
    """All of an expert, flattened."""
    return jnp.concatenate([_slice(leaf, place).ravel() for leaf in leaves])


def _slice(leaf: jax.Array, place: Place) -> jax.Array:
    return jax.lax.dynamic_slice(leaf, _start(leaf, place), (1, 1, *leaf.shape[2:]))


def _put(leaves: Leaves, place: Place, expert: Float[Array, " n"]) -> Leaves:
    sizes = [leaf[0, 0].size for leaf in leaves]
    parts = jnp.split(expert, np.cumsum(sizes)[:-1].tolist())
    return [
        jax.lax.dynamic_update_slice(leaf, part.reshape(1, 1, *leaf.shape[2:]), _start(leaf, place))
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _start(leaf: jax.Array, place: Place) -> list[Any]:
    return [place.row, place.slot, *(0,) * (leaf.ndim - 2)]
