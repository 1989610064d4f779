"""Order that data does not impose, e.g. of two collectives."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

_TILE = 8  # rows of the smallest matrix product that XLA:CPU gives to its library of products


def after(x: Shaped[Array, "..."], dependency: Shaped[Array, "..."], platform: str) -> Shaped[Array, "..."]:
    """`x`, bit for bit, but nothing that uses it can start before `dependency` exists. Neither may be empty.

    XLA:CPU drops optimisation barriers before it orders operations. There, 0 computed from an element of `dependency`
    is subtracted from one of `x`; which kind of zero it is, and that x can be infinite or NaN, changes nothing.
    """
    if platform != "cpu":
        return jax.lax.optimization_barrier((x, dependency))[0]
    zero = _zero(dependency).reshape((1,) * x.ndim)
    # one element in place; subtracting from all would be a pass over x. Subtracting, because -0.0 + 0.0 = 0.0.
    changed = _first(x) - zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, changed, (0,) * x.ndim)


def hold(x: Shaped[Array, "..."], held: Shaped[Array, "..."], platform: str) -> Shaped[Array, "..."]:
    """`x`, bit for bit; the memory of `held` is not reused before `x` exists. Neither may be empty.

    XLA:CPU runs collectives beside computations, but assigns memory as if they ran one after another: what it sees as
    free behind a collective, it gives to the next computation, which then waits for the collective to end.
    """
    if platform != "cpu":
        return x
    # a branch that x decides on is not fused with what computed `held`, which would be computed again instead
    never = _zero(jax.lax.stop_gradient(x)).reshape(()) > 0
    held = jax.lax.stop_gradient(held)
    element = jax.lax.cond(never, _first, lambda held: _first(jnp.zeros_like(held)), held)
    return after(x, element, platform)


def apart(x: Shaped[Array, "..."], platform: str) -> Shaped[Array, "..."]:
    """`x`, bit for bit, such that a collective that uses it keeps no other work waiting.

    XLA:CPU runs a collective on the thread that made its operand, and whatever else is ready in this thread's queue
    waits until the collective ends. Products are passed on to another thread, and what needs them follows there.
    """
    if platform != "cpu" or x.size < _TILE**2:
        return x
    tile = jax.lax.stop_gradient(x).reshape(-1)[: _TILE**2].reshape(_TILE, _TILE).astype(jnp.float32)
    return after(x, tile @ tile, platform)


def _zero(x: jax.Array) -> jax.Array:
    """0, computed from an element of x. XLA folds products with 0 and comparisons with itself, but knows no ranges."""
    return (_first(x) > 0).astype(jnp.uint32) >> 1


def _first(x: jax.Array) -> jax.Array:
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
