"""Room for what weight gradients wait for, in kept values that nobody reads any more.

A value of the same shape takes the place of another; others lie along its longest axis, two numbers of 16 bits in one
of 32. The host is never reshaped, only values are: compilers choose how it lies in memory, and would copy all of it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Shape = jax.ShapeDtypeStruct


class BufferSlot(NamedTuple):
    """A part of a kept value for a guest: elements from `start` on along the host's longest axis."""

    place: int  # the number of the kept value
    guest: Shape
    start: int = 0

    def put(self, x: jax.Array, value: jax.Array, slot: jax.Array | int) -> jax.Array:
        """The host's array [slots, …] with the guest in a slot."""
        host, length = _host(x), self._length(x)
        part = _packed(value, host.dtype).reshape(_part_shape(host, length))
        return jax.lax.dynamic_update_slice(x, part[None], self._corner(host, slot))

    def get(self, x: jax.Array, slot: jax.Array | int) -> jax.Array:
        """The guest in a slot of the host's array."""
        host, length = _host(x), self._length(x)
        return _unpacked(
            jax.lax.dynamic_slice(x, self._corner(host, slot), (1, *_part_shape(host, length))), self.guest
        )

    def _length(self, x: jax.Array) -> int:
        length = _length_in(self.guest, _host(x))
        assert length is not None
        return length

    def _corner(self, host: Shape, slot: jax.Array | int) -> tuple[jax.Array | int, ...]:
        corner = [slot] + [0] * len(host.shape)
        corner[1 + _axis(host)] = self.start
        return tuple(corner)


def assign_buffer_slots(values: Mapping[int, Shape], hosts: Mapping[int, Shape]) -> dict[int, BufferSlot]:
    """A buffer_slot for as many values as fit, by their number; hosts are kept values by theirs.

    Hosts of a guest's own shape first; then the largest values in the host that has least left.
    """
    found: dict[int, BufferSlot] = {}
    empty = {place: host for place, host in hosts.items() if host.shape and math.prod(host.shape)}
    for number, guest in values.items():
        alike = [place for place, host in empty.items() if (host.shape, host.dtype) == (guest.shape, guest.dtype)]
        if alike:
            found[number] = BufferSlot(alike[0], guest)
            del empty[alike[0]]
    left = {place: max(host.shape) for place, host in empty.items()}
    others = (number for number in values if number not in found)
    for number in sorted(others, key=lambda number: _bytes(values[number]), reverse=True):
        needs = {place: _length_in(values[number], host) for place, host in empty.items()}
        fitting = {place: length for place, length in needs.items() if length and length <= left[place]}
        if fitting:
            place = min(fitting, key=left.__getitem__)
            found[number] = BufferSlot(place, values[number], max(empty[place].shape) - left[place])
            left[place] -= fitting[place]
    return found


def _host(x: jax.Array) -> Shape:
    return Shape(x.shape[1:], x.dtype)


def _axis(host: Shape) -> int:
    return host.shape.index(max(host.shape))


def _part_shape(host: Shape, length: int) -> tuple[int, ...]:
    axis = _axis(host)
    return (*host.shape[:axis], length, *host.shape[axis + 1 :])


def _length_in(guest: Shape, host: Shape) -> int | None:
    """How long a guest's part is; None if it cannot lie there."""
    if guest.shape == host.shape and guest.dtype == host.dtype:
        return max(host.shape)
    if not all(jnp.issubdtype(value.dtype, jnp.floating) for value in (guest, host)):
        return None
    if host.dtype != guest.dtype and (host.dtype.itemsize, guest.dtype.itemsize) != (4, 2):
        return None
    across = _bytes(host) // max(host.shape)
    return _bytes(guest) // across if _bytes(guest) % across == 0 else None


def _bytes(value: Shape) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _packed(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Its bits, as numbers of the host's type; the first half of a guest of 16 bits beside the second."""
    if value.dtype == dtype:
        return value
    low, high = jax.lax.bitcast_convert_type(value, jnp.uint16).reshape(2, -1).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(low | high << 16, dtype)


def _unpacked(part: jax.Array, guest: Shape) -> jax.Array:
    if part.dtype != guest.dtype:
        bits = jax.lax.bitcast_convert_type(part.ravel(), jnp.uint32)
        halves = jnp.stack([bits & 0xFFFF, bits >> 16]).astype(jnp.uint16)
        part = jax.lax.bitcast_convert_type(halves, guest.dtype)
    return part.reshape(guest.shape)
