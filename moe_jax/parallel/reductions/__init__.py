"""Implementations of the sum of a flat vector over the ranks of mesh axes: one file each, one signature.

Each gives the same bits on every rank; results of different implementations differ by rounding. The `SCATTERS` of the
same names take one vector per rank, and return to each rank the sum of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from moe_jax.config import registry
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.reductions import tiles


class ReduceImpl(NamedTuple):
    """An implementation in two halves. Other work can run between them."""

    start: Callable[[jax.Array, tuple[Axis, ...]], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...]], jax.Array]
    only_starts: bool = False  # whether `start` only submits the vector and returns before anything has arrived

    def __call__(self, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
        """Run both halves."""
        return self.finish(self.start(x, axes))


def _blocking(reduce: Callable[[jax.Array, tuple[Axis, ...]], jax.Array]) -> ReduceImpl:
    return ReduceImpl(lambda x, axes: (reduce(x, axes),), lambda under_way: under_way[0])


def _implementation(name: str, module: Any, whole: str, start: str) -> ReduceImpl:
    """Return the implementation in a file: its function `whole`, or its two halves."""
    if registry.REDUCTION_FACTS[name].only_starts:
        return ReduceImpl(getattr(module, start), module.finish, only_starts=True)
    return _blocking(getattr(module, whole))


_FILES = registry.REDUCTION_FACTS.modules()
REDUCTIONS = {name: _implementation(name, module, "reduce", "start") for name, module in _FILES.items()}
SCATTERS = {name: _implementation(name, module, "scatter", "start_scatter") for name, module in _FILES.items()}
_ON_TPU = _blocking(tiles.scatter)


def scatter_of(name: str, platform: str) -> ReduceImpl:
    """Return the implementation of `SCATTERS` that the compiler of a platform keeps as a reduce-scatter."""
    return _ON_TPU if platform == "tpu" and registry.REDUCTION_FACTS[name].one_scatter else SCATTERS[name]
