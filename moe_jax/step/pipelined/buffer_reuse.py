"""Store what weight gradients wait for in the memory of saved residuals that are no longer read.

A value of the same shape replaces a residual; other values are packed along its longest axis, two 16-bit numbers into
one of 32 bits. Only the stored value is reshaped, never the buffer: XLA chooses the buffer's layout, and a reshape
would copy all of it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Shape = jax.ShapeDtypeStruct


class BufferSlot(NamedTuple):
    """A part of a buffer for one value: elements from `start` on along the buffer's longest axis."""

    place: int  # the number of the buffer
    shape: Shape  # the value's shape
    start: int = 0

    def put(self, x: jax.Array, value: jax.Array, slot: jax.Array | int) -> jax.Array:
        """Return the buffer's array [slots, …] with the value written to a slot."""
        buffer, length = _slot_shape(x), self._length(x)
        part = _packed(value, buffer.dtype).reshape(_part_shape(buffer, length))
        return jax.lax.dynamic_update_slice(x, part[None], self._corner(buffer, slot))

    def get(self, x: jax.Array, slot: jax.Array | int) -> jax.Array:
        """Return the value in a slot of the buffer's array."""
        buffer, length = _slot_shape(x), self._length(x)
        return _unpacked(
            jax.lax.dynamic_slice(x, self._corner(buffer, slot), (1, *_part_shape(buffer, length))), self.shape
        )

    def _length(self, x: jax.Array) -> int:
        length = _length_in(self.shape, _slot_shape(x))
        assert length is not None
        return length

    def _corner(self, buffer: Shape, slot: jax.Array | int) -> tuple[jax.Array | int, ...]:
        corner = [slot] + [0] * len(buffer.shape)
        corner[1 + _axis(buffer)] = self.start
        return tuple(corner)


def assign_buffer_slots(values: Mapping[int, Shape], buffers: Mapping[int, Shape]) -> dict[int, BufferSlot]:
    """Return a part of a buffer for as many values as fit, by the number of the value. `buffers` are unread residuals,
    by number.

    Values of a buffer's own shape are assigned first. Then each value, the largest first, goes to the fitting buffer
    with the least space left.
    """
    found: dict[int, BufferSlot] = {}
    free = {place: buffer for place, buffer in buffers.items() if buffer.shape and math.prod(buffer.shape)}
    for number, value in values.items():
        same = [place for place, buffer in free.items() if (buffer.shape, buffer.dtype) == (value.shape, value.dtype)]
        if same:
            found[number] = BufferSlot(same[0], value)
            del free[same[0]]
    left = {place: max(buffer.shape) for place, buffer in free.items()}
    others = (number for number in values if number not in found)
    for number in sorted(others, key=lambda number: _bytes(values[number]), reverse=True):
        needs = {place: _length_in(values[number], buffer) for place, buffer in free.items()}
        fitting = {place: length for place, length in needs.items() if length and length <= left[place]}
        if fitting:
            place = min(fitting, key=left.__getitem__)
            found[number] = BufferSlot(place, values[number], max(free[place].shape) - left[place])
            left[place] -= fitting[place]
    return found


def _slot_shape(x: jax.Array) -> Shape:
    return Shape(x.shape[1:], x.dtype)


def _axis(buffer: Shape) -> int:
    return buffer.shape.index(max(buffer.shape))


def _part_shape(buffer: Shape, length: int) -> tuple[int, ...]:
    axis = _axis(buffer)
    return (*buffer.shape[:axis], length, *buffer.shape[axis + 1 :])


def _length_in(value: Shape, buffer: Shape) -> int | None:
    """Return the length of a value's part of a buffer, or None if it cannot be stored there."""
    if value.shape == buffer.shape and value.dtype == buffer.dtype:
        return max(buffer.shape)
    if not all(jnp.issubdtype(each.dtype, jnp.floating) for each in (value, buffer)):
        return None
    if buffer.dtype != value.dtype and (buffer.dtype.itemsize, value.dtype.itemsize) != (4, 2):
        return None
    across = _bytes(buffer) // max(buffer.shape)
    return _bytes(value) // across if _bytes(value) % across == 0 else None


def _bytes(value: Shape) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _packed(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return a value's bits as numbers of the buffer's type; 16-bit numbers of the first half are paired with those of
    the second half.
    """
    if value.dtype == dtype:
        return value
    low, high = jax.lax.bitcast_convert_type(value, jnp.uint16).reshape(2, -1).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(low | high << 16, dtype)


def _unpacked(part: jax.Array, value: Shape) -> jax.Array:
    if part.dtype != value.dtype:
        bits = jax.lax.bitcast_convert_type(part.ravel(), jnp.uint32)
        halves = jnp.stack([bits & 0xFFFF, bits >> 16]).astype(jnp.uint16)
        part = jax.lax.bitcast_convert_type(halves, value.dtype)
    return part.reshape(value.shape)
