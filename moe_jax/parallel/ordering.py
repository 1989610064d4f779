"""Order that data does not impose, e.g. of two collectives."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def depend_on(x: Shaped[Array, "..."], dependency: Shaped[Array, "..."], platform: str) -> Shaped[Array, "..."]:
    """`x`, bit for bit, but nothing that uses it can start before `dependency` exists. Neither may be empty.

    XLA:CPU drops optimisation barriers before it orders operations.
    """
    if platform != "cpu":
        return jax.lax.optimization_barrier((x, dependency))[0]
    return barrier_after(x, dependency)


def depend_on_all(x: Shaped[Array, "..."], dependencies: Iterable[Array], platform: str) -> Shaped[Array, "..."]:
    """The same for several; empty ones cannot be waited for."""
    for dependency in dependencies:
        x = depend_on(x, dependency, platform) if dependency.size else x
    return x


def barrier_after(x: Shaped[Array, "..."], dependency: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same where compilers drop barriers: 0 computed from an element of `dependency` is subtracted from one of `x`.

    Which kind of zero it is, and that x can be infinite or NaN, changes nothing.
    """
    zero = _zero(dependency).reshape((1,) * x.ndim)
    # one element in place; subtracting from all would be a pass over x. Subtracting, because -0.0 + 0.0 = 0.0.
    changed = _first(x) - zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, changed, (0,) * x.ndim)


def _zero(x: jax.Array) -> jax.Array:
    """0, computed from an element of x. XLA folds products with 0 and comparisons with itself, but knows no ranges."""
    return (_first(x) > 0).astype(jnp.uint32) >> 1


def _first(x: jax.Array) -> jax.Array:
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
