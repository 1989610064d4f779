"""Ring buffers on a device for values that outlive a tick, shared by chunks whose values differ."""

import itertools
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from moe_jax.step.pipelined.buffer_reuse import BufferSlot


class Buffers:
    """`shapes` of the values of each structure; a slot has buffer_slot for those of any one."""

    def __init__(self, shapes: Sequence[Sequence[jax.ShapeDtypeStruct]], num_slots: int):
        self._num_slots = num_slots
        kinds = [[(leaf.shape, leaf.dtype) for leaf in values] for values in shapes]
        most: Counter[tuple[tuple[int, ...], jnp.dtype]] = Counter()
        for values in kinds:
            most |= Counter(values)
        first = dict(zip(most, itertools.accumulate(most.values(), initial=0), strict=False))
        self._arrays = [kind for kind, count in most.items() for _ in range(count)]
        self._places = []  # of each structure's values among the arrays
        for values in kinds:
            seen: Counter[tuple[tuple[int, ...], jnp.dtype]] = Counter()
            places = []
            for kind in values:
                places.append(first[kind] + seen[kind])
                seen[kind] += 1
            self._places.append(places)

    def empty(self) -> list[jax.Array]:
        """Arrays [slots, …]."""
        return [jnp.zeros((self._num_slots, *shape), dtype) for shape, dtype in self._arrays]

    def write(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The arrays with the values of one structure in a slot."""
        arrays = list(arrays)
        for place, value in zip(self._places[structure], values, strict=True):
            arrays[place] = put(arrays[place], value, slot)
        return arrays

    def write_reused(
        self,
        arrays: list[jax.Array],
        structure: int,
        slot: jax.Array | int,
        buffer_slots: Sequence[BufferSlot],
        values: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """The arrays with values in buffer_slots of the values in a slot."""
        arrays, places = list(arrays), self._places[structure]
        for buffer_slot, guest in zip(buffer_slots, values, strict=True):
            arrays[places[buffer_slot.place]] = buffer_slot.put(arrays[places[buffer_slot.place]], guest, slot)
        return arrays

    def read_reused(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, buffer_slots: Sequence[BufferSlot]
    ) -> list[jax.Array]:
        """The values in these buffer_slots."""
        return [
            buffer_slot.get(arrays[self._places[structure][buffer_slot.place]], slot) for buffer_slot in buffer_slots
        ]

    def read(self, arrays: list[jax.Array], structure: int, slot: jax.Array | int) -> list[jax.Array]:
        """What was written."""
        return [get(arrays[place], slot) for place in self._places[structure]]


def get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    """An element along the leading dimension."""
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    """The same array with another element there."""
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)


def with_own_layout(values: Sequence[jax.Array], platform: str) -> list[jax.Array]:
    """The same values, whose users have no say in how the arrays that they lay in are laid out.

    Else XLA:GPU lays out all slots as who reads one wants it, and copies them in every tick: 1.3 × the step on 8 H100.
    XLA:TPU does not, and takes 1.8 × as long where values have to be laid out so.
    """
    if platform == "gpu":
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in values]
    return list(values)
