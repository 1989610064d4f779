"""Order between operations that no data dependency imposes, e.g. between two collectives."""

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

_Tree = TypeVar("_Tree")


def depend_on(x: _Tree, dependency: Shaped[Array, "..."], platform: str) -> _Tree:
    """Return `x`, an array or a tree of arrays, unchanged, bit for bit.

    Operations that use it cannot start before `dependency` exists. Nothing waits where one of the two is empty.
    XLA:CPU drops optimisation barriers before it orders operations, so on CPU `barrier_after` is used.
    """

    def ordered(leaf: jax.Array) -> jax.Array:
        if not leaf.size:
            return leaf
        if platform != "cpu":
            return jax.lax.optimization_barrier((leaf, dependency))[0]
        return barrier_after(leaf, dependency)

    return jax.tree.map(ordered, x) if dependency.size else x


def depend_on_all(x: Shaped[Array, "..."], dependencies: Iterable[Array], platform: str) -> Shaped[Array, "..."]:
    """Do the same for several dependencies."""
    for dependency in dependencies:
        x = depend_on(x, dependency, platform)
    return x


def barrier_after(x: Shaped[Array, "..."], dependency: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Do the same as `depend_on`, for an array, where the compiler drops barriers. Neither array may be empty.

    An element of `x` is written where it was read, at an index of 0 computed from `dependency`. It has to be in the
    bounds of `x`: XLA joins a slice of a slice, and clamps their sum to the bounds of the outer array alone.
    """
    zero = _zero(dependency)
    if x.size == 1:  # XLA knows its only index. Subtracted, because -0.0 + 0.0 = 0.0.
        return x - zero.astype(x.dtype)
    index, element = (zero,) * x.ndim, (1,) * x.ndim
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, index, element), index)


def _zero(x: jax.Array) -> UInt32[Array, ""]:
    """Return 0, computed from an element of x; unsigned, because jax counts signed indices from the end.

    XLA folds products with 0 and comparisons of a value with itself, but it does not track ranges of values.
    """
    first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    return (first > 0).astype(jnp.uint32) >> 1
