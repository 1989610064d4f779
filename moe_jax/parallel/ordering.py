"""Order between operations that no data dependency imposes, e.g. between two collectives."""

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

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

    A 0 computed from an element of `dependency` is subtracted from an element of `x`. The sign of this zero does not
    matter, nor does an infinity or NaN in `x`.
    """
    zero = _zero(dependency).reshape((1,) * x.ndim)
    # One element in place: subtracting from all would be a pass over x. Subtracting, because -0.0 + 0.0 = 0.0.
    changed = _first(x) - zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, changed, (0,) * x.ndim)


def _zero(x: jax.Array) -> jax.Array:
    """Return 0, computed from an element of x.

    XLA folds products with 0 and comparisons of a value with itself, but it does not track ranges of values.
    """
    return (_first(x) > 0).astype(jnp.uint32) >> 1


def _first(x: jax.Array) -> jax.Array:
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
