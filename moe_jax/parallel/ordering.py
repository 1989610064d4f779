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

    An element of `x` is written where it was read, at an index computed from `dependency`, which XLA clamps to the
    bounds of `x`.
    """
    if x.size == 1:  # XLA knows its only index. A 0 that it cannot fold; subtracted, because -0.0 + 0.0 = 0.0.
        return x - ((_bits(dependency) > 0).astype(jnp.uint32) >> 1).astype(x.dtype)
    index, element = (_bits(dependency),) * x.ndim, (1,) * x.ndim
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, index, element), index)


def _bits(x: jax.Array) -> UInt32[Array, ""]:
    """Return the bits of an element of x as an unsigned number: jax counts signed indices from the end."""
    first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    if not jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.bool_:
        first = jax.lax.bitcast_convert_type(first, f"uint{8 * x.dtype.itemsize}")
    return first.astype(jnp.uint32)
