"""Values stored in parts of larger buffers: read back bit for bit, and no value overwrites another."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.step.pipelined.buffer_reuse import BufferSlot, assign_buffer_slots

KINDS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "i32": jnp.int32}


def shape_of(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, KINDS[kind])


def shape_with(slots: int, host: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((slots, *host.shape), host.dtype)


def any_bits(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """All patterns of 32 bits; for 16 bits numbers of all sizes, as CPUs do not copy signalling NaNs as they are."""
    source = np.random.default_rng(seed)
    if shape.dtype.itemsize == 2:
        numbers = source.standard_normal(shape.shape) * 2.0 ** source.integers(-120, 120, shape.shape)
        return jnp.asarray(numbers, shape.dtype)
    return jnp.asarray(source.integers(0, 256, (*shape.shape, 4), np.uint8).view(shape.dtype)[..., 0])


def bits_of(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(
    ("host", "guest"),
    [
        (shape_of("f32", 4, 6), shape_of("f32", 4, 6)),
        (shape_of("i32", 5), shape_of("i32", 5)),
        (shape_of("bf16", 1, 8, 2, 1, 4), shape_of("bf16", 1, 8, 2, 4)),
        (shape_of("f32", 1, 4, 16, 1, 16), shape_of("bf16", 4, 8, 16)),
        (shape_of("f32", 2, 3, 8), shape_of("f32", 6, 5)),
    ],
)
def test_a_guest_comes_out_as_it_went_in_and_nothing_else_changes(host, guest) -> None:
    (buffer_slot,) = assign_buffer_slots({7: guest}, {3: host}).values()
    assert buffer_slot.place == 3
    x, value = any_bits(shape_with(3, host), 0), any_bits(guest, 1)
    moved = jax.jit(buffer_slot.put)(x, value, 1)
    np.testing.assert_array_equal(bits_of(jax.jit(buffer_slot.get)(moved, 1)), bits_of(value))
    np.testing.assert_array_equal(bits_of(moved[0]), bits_of(x[0]))
    np.testing.assert_array_equal(bits_of(moved[2]), bits_of(x[2]))
    changed = (bits_of(moved[1]) != bits_of(x[1])).sum()
    assert changed <= value.nbytes


def test_guests_share_a_host_without_meeting() -> None:
    hosts = {0: shape_of("f32", 2, 64, 4), 5: shape_of("f32", 64, 4), 9: shape_of("bf16", 32)}
    sizes = {1: 8, 2: 24, 4: 40, 6: 64, 7: 16}
    guests = {number: shape_of("bf16", rows, 4) for number, rows in sizes.items()} | {3: shape_of("f32", 64, 4)}
    found = assign_buffer_slots(guests, hosts)
    assert found.keys() == guests.keys()
    assert found[3] == BufferSlot(5, guests[3])  # its own shape
    values = {number: any_bits(guest, number) for number, guest in guests.items()}
    x = {
        place: any_bits(jax.ShapeDtypeStruct((1, *host.shape), host.dtype), 50 + place) for place, host in hosts.items()
    }
    for order in itertools.islice(itertools.permutations(found), 0, None, 97):
        for number in order:
            x[found[number].place] = found[number].put(x[found[number].place], values[number], 0)
        for number, buffer_slot in found.items():
            np.testing.assert_array_equal(bits_of(buffer_slot.get(x[buffer_slot.place], 0)), bits_of(values[number]))


@pytest.mark.parametrize(
    ("host", "guest"),
    [
        (shape_of("f32", 8, 4), shape_of("f32", 9, 4)),  # too large
        (shape_of("f32", 8, 4), shape_of("f32", 3)),  # no whole number of rows
        (shape_of("bf16", 8, 4), shape_of("f32", 4)),
        (shape_of("i32", 8, 4), shape_of("bf16", 8)),
        (shape_of("f32"), shape_of("f32")),
    ],
)
def test_there_is_no_room_for_what_does_not_fit(host, guest) -> None:
    assert assign_buffer_slots({0: guest}, {0: host}) == {}


def test_values_without_elements_are_neither_hosts_nor_in_the_way() -> None:
    """A piece of the slots may be empty."""
    hosts = {0: shape_of("f32", 2, 0, 4), 1: shape_of("f32", 0), 2: shape_of("f32", 8, 4)}
    guests = {5: shape_of("f32", 6, 4), 6: shape_of("f32", 0, 4), 7: shape_of("f32", 2, 0, 4)}
    assert assign_buffer_slots(guests, hosts) == {5: BufferSlot(2, guests[5])}
