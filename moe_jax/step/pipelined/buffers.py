"""Ring buffers on a device for values that outlive a tick, shared by chunks whose values differ."""

import itertools
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moe_jax.step.pipelined.buffer_reuse import BufferSlot
from moe_jax.step.pipelined.slot_ops import get, put


class Buffers:
    """`shapes` of the values of each structure; a slot has room for those of any one."""

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

    def move_in(
        self,
        arrays: list[jax.Array],
        structure: int,
        slot: jax.Array | int,
        rooms: Sequence[BufferSlot],
        guests: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """The arrays with guests in rooms of the values in a slot."""
        arrays, places = list(arrays), self._places[structure]
        for room, guest in zip(rooms, guests, strict=True):
            arrays[places[room.place]] = room.put(arrays[places[room.place]], guest, slot)
        return arrays

    def visit(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, rooms: Sequence[BufferSlot]
    ) -> list[jax.Array]:
        """The guests in these rooms."""
        return [room.get(arrays[self._places[structure][room.place]], slot) for room in rooms]

    def read(self, arrays: list[jax.Array], structure: int, slot: jax.Array | int) -> list[jax.Array]:
        """What was written."""
        return [get(arrays[place], slot) for place in self._places[structure]]
