"""Ring buffers on a device for values that outlive a tick, shared by model chunks with different values."""

import itertools
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from moe_jax.step.pipelined.buffer_reuse import BufferSlot


class SlotBuffers:
    """Ring buffers. `shapes` are those of the values of each chunk structure; a slot has space for the values of any
    one structure.
    """

    def __init__(self, shapes: Sequence[Sequence[jax.ShapeDtypeStruct]], num_slots: int):
        self._num_slots = num_slots
        kinds = [[(leaf.shape, leaf.dtype) for leaf in values] for values in shapes]
        most: Counter[tuple[tuple[int, ...], jnp.dtype]] = Counter()
        for values in kinds:
            most |= Counter(values)
        first = dict(zip(most, itertools.accumulate(most.values(), initial=0), strict=False))
        self._arrays = [kind for kind, count in most.items() for _ in range(count)]
        self._places = []  # by structure: the array of each value
        for values in kinds:
            seen: Counter[tuple[tuple[int, ...], jnp.dtype]] = Counter()
            places = []
            for kind in values:
                places.append(first[kind] + seen[kind])
                seen[kind] += 1
            self._places.append(places)

    def empty(self) -> list[jax.Array]:
        """Return zeroed arrays [slots, …]."""
        return [jnp.zeros((self._num_slots, *shape), dtype) for shape, dtype in self._arrays]

    def write(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the arrays with the values of one structure written to a slot."""
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
        """Return the arrays with `values` written to parts of the structure's values in a slot."""
        arrays, places = list(arrays), self._places[structure]
        for part, value in zip(buffer_slots, values, strict=True):
            arrays[places[part.place]] = part.put(arrays[places[part.place]], value, slot)
        return arrays

    def read_reused(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, buffer_slots: Sequence[BufferSlot]
    ) -> list[jax.Array]:
        """Return the values in these parts of a slot."""
        places = self._places[structure]
        return [part.get(arrays[places[part.place]], slot) for part in buffer_slots]

    def read(self, arrays: list[jax.Array], structure: int, slot: jax.Array | int) -> list[jax.Array]:
        """Return the values that `write` stored in a slot."""
        return [get(arrays[place], slot) for place in self._places[structure]]


def get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    """Return the element at `place` along the leading dimension."""
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    """Return the array with `value` at `place` along the leading dimension."""
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)


def with_own_layout(values: Sequence[jax.Array], platform: str) -> list[jax.Array]:
    """Return the same values, so that their users do not affect the layout of the arrays they were read from.

    Otherwise XLA:GPU lays out all slots as the reader of one slot prefers, and copies them in every tick: 1.3 × the
    step time on 8 H100. XLA:TPU does not do this, and a fixed layout takes 1.8 × as long there.
    """
    if platform == "gpu":
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in values]
    return list(values)
