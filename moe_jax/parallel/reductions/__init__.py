"""Ways to sum a flat vector over the ranks of mesh axes: one file each, one signature.

Each leaves the same bits on every rank; from one way to another they differ by round-off. The `SCATTERS` of the same
names take a vector for each rank, and leave a rank the sum of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.reductions import all_reduce, background, ring, scatter_gather, tiles


class Way(NamedTuple):
    """A way in two halves, between which other work runs."""

    start: Callable[[jax.Array, tuple[Axis, ...]], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...]], jax.Array]
    only_starts: bool = False  # whether `start` only hands over, so that it returns before anything has arrived

    def __call__(self, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
        """Both halves."""
        return self.finish(self.start(x, axes))


def _in_one_go(reduce: Callable[[jax.Array, tuple[Axis, ...]], jax.Array]) -> Way:
    return Way(lambda x, axes: (reduce(x, axes),), lambda under_way: under_way[0])


REDUCTIONS = {
    "all_reduce": _in_one_go(all_reduce.reduce),
    "scatter_gather": _in_one_go(scatter_gather.reduce),
    "ring": _in_one_go(ring.reduce),
    "background": Way(background.start, background.finish, only_starts=True),
}
SCATTERS = {
    "all_reduce": _in_one_go(scatter_gather.scatter),
    "scatter_gather": _in_one_go(scatter_gather.scatter),
    "ring": _in_one_go(ring.scatter),
    "background": Way(background.start_scatter, background.finish, only_starts=True),
}
_ON_TPU = _in_one_go(tiles.scatter)


def scatter_of(name: str, platform: str) -> Way:
    """The way of `SCATTERS` that stays a reduce-scatter on a platform."""
    return _ON_TPU if platform == "tpu" and name in ("all_reduce", "scatter_gather") else SCATTERS[name]
