"""Ways to sum a flat vector over the ranks of mesh axes: one file each, one signature.

Each leaves the same bits on every rank; from one way to another they differ by round-off. The `SCATTERS` of the same
names take a vector for each rank, and leave a rank the sum of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from moe_jax.config import registry
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.reductions import tiles


class ReduceImpl(NamedTuple):
    """A way in two halves, between which other work runs."""

    start: Callable[[jax.Array, tuple[Axis, ...]], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...]], jax.Array]
    only_starts: bool = False  # whether `start` only hands over, so that it returns before anything has arrived

    def __call__(self, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
        """Both halves."""
        return self.finish(self.start(x, axes))


def _in_one_go(reduce: Callable[[jax.Array, tuple[Axis, ...]], jax.Array]) -> ReduceImpl:
    return ReduceImpl(lambda x, axes: (reduce(x, axes),), lambda under_way: under_way[0])


def _way(name: str, module: Any, whole: str, start: str) -> ReduceImpl:
    """Of a file's function, or of its halves."""
    if registry.REDUCTION_FACTS[name].only_starts:
        return ReduceImpl(getattr(module, start), module.finish, only_starts=True)
    return _in_one_go(getattr(module, whole))


_FILES = registry.REDUCTION_FACTS.modules()
REDUCTIONS = {name: _way(name, module, "reduce", "start") for name, module in _FILES.items()}
SCATTERS = {name: _way(name, module, "scatter", "start_scatter") for name, module in _FILES.items()}
_ON_TPU = _in_one_go(tiles.scatter)


def scatter_of(name: str, platform: str) -> ReduceImpl:
    """The way of `SCATTERS` that stays a reduce-scatter on a platform."""
    return _ON_TPU if platform == "tpu" and registry.REDUCTION_FACTS[name].one_scatter else SCATTERS[name]
