"""Ways to exchange blocks of rows between the ranks of a mesh axis: one file each, one signature.

`start` sends block p to rank p and returns what is under way; `finish` puts together the blocks that came, block p from
rank p. Together they are their own inverse and their own transpose.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from moe_jax.parallel.all_to_all import flat, ring
from moe_jax.parallel.mesh import Axis


class Exchange(NamedTuple):
    """An algorithm in two halves, between which other work runs."""

    start: Callable[[jax.Array, Axis, str], tuple[jax.Array, ...]]
    finish: Callable[[tuple[jax.Array, ...], Axis, str], jax.Array]

    def __call__(self, x: jax.Array, axis: Axis, platform: str) -> jax.Array:
        """Both halves."""
        return self.finish(self.start(x, axis, platform), axis, platform)


EXCHANGES = {"flat": Exchange(flat.start, flat.finish), "ring": Exchange(ring.start, ring.finish)}
