"""Ring buffers on a device for values that outlive a tick, shared by chunks whose values differ."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp


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
        return self.write_over(arrays, structure, slot, dict(enumerate(values)))

    def write_over(
        self, arrays: list[jax.Array], structure: int, slot: jax.Array | int, values: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Of the values in a slot these, by their number."""
        arrays, places = list(arrays), self._places[structure]
        for number, value in values.items():
            arrays[places[number]] = put(arrays[places[number]], value, slot)
        return arrays

    def read(self, arrays: list[jax.Array], structure: int, slot: jax.Array | int) -> list[jax.Array]:
        """What was written."""
        return [get(arrays[place], slot) for place in self._places[structure]]


def get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    """An element along the leading dimension."""
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    """The same array with another element there."""
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)
