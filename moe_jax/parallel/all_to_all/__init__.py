"""Ways to exchange blocks of rows between the ranks of a mesh axis: one file each, one signature.

`start` sends block p to rank p and returns what is under way; `finish` puts together the blocks that came, block p from
rank p. Together they are their own inverse and their own transpose.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.parallel.all_to_all import background, flat, halo, hier_1d, hier_2d, ring
from moe_jax.parallel.ranks import Ranks


class Exchange(NamedTuple):
    """An algorithm in two halves, between which other work runs."""

    start: Callable[[jax.Array, Ranks], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...], Ranks], jax.Array]
    only_starts: bool = False  # whether `start` only hands over, so that it returns before anything has arrived

    def __call__(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """Both halves."""
        return _both(self, ranks, x)

    def between(self, ranks: Ranks) -> Callable[[jax.Array], jax.Array]:
        """Both halves, as a function of the rows alone."""
        return lambda x: self(x, ranks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _both(exchange: Exchange, ranks: Ranks, x: jax.Array) -> jax.Array:
    return exchange.finish(exchange.start(x, ranks), ranks)


def _forward(exchange: Exchange, ranks: Ranks, x: jax.Array) -> tuple[jax.Array, None]:
    return _both(exchange, ranks, x), None


def _backward(exchange: Exchange, ranks: Ranks, _: None, dx: jax.Array) -> tuple[jax.Array | None]:
    return (_both(exchange, ranks, dx) if jnp.issubdtype(dx.dtype, jnp.floating) else None,)


_both.defvjp(_forward, _backward)

BY_NODE = {
    "hier_1d": Exchange(hier_1d.start, hier_1d.finish),
    "hier_2d": Exchange(hier_2d.start, hier_2d.finish),
    "halo": Exchange(halo.start, halo.finish),
}
EXCHANGES = {
    "flat": Exchange(flat.start, flat.finish),
    "ring": Exchange(ring.start, ring.finish),
    **BY_NODE,
    "background": Exchange(background.start, background.finish, only_starts=True),
}
