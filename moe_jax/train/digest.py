"""Digests of arrays: two numbers for each, made where the arrays lie, and the same however they are cut over devices.

L arrays.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.stages import Wrapped
from jaxtyping import Array, UInt32

from moe_jax.parallel.sharding import REPLICATED

Digest = tuple[int, int]

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by the bytes of an element; 8 are two words


def digests(tree: Any) -> UInt32[Array, "L 2"]:
    """Of each array, in the order of the tree's leaves, with sums modulo 2³², which no order of adding changes.

    The first is Σ word · (2·index + 1) over the array's words and their global indices: as the weights are odd, any one
    bit changes it. But two flipped sign bits leave it as it is (2³¹ times the sum of two odd numbers), so the second is
    Σ mix(word ⊕ mix(index)), in which every bit of a word decides all bits of what is added.
    """
    return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(tree)])


def digest_program(like: Any) -> Wrapped:
    """`digests` as one program for trees whose arrays are placed like these; every device gets all numbers."""
    placed = jax.tree.leaves(like)[0].sharding
    whole = NamedSharding(placed.mesh, REPLICATED) if isinstance(placed, NamedSharding) else None
    return jax.jit(digests, out_shardings=whole)


def names_of(tree: Any) -> list[str]:
    """Of the leaves: the way to each, e.g. `params.head`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def _digest(x: jax.Array) -> UInt32[Array, " 2"]:
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    word = bits.astype(jnp.uint32)
    index, zero = _index(word.shape), jnp.uint32(0)
    terms = word * (2 * index + 1), _mix(word ^ _mix(index))
    # one reduction of both, for which nothing is stored on the way; two would share terms as large as the array
    return jnp.stack(jax.lax.reduce(terms, (zero, zero), _add, tuple(range(word.ndim))))


def _add(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(some, others, strict=True)]


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Of each element in the whole array, in row-major order, modulo 2³²."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def _mix(word: jax.Array) -> jax.Array:
    """The last steps of MurmurHash3 (Appleby): one to one, and every bit depends on all."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
