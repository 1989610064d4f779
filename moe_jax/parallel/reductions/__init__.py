"""Implementations of the sum of a vector over the ranks of mesh axes: one file each, one signature.

Each gives the same bits on every rank; results of different implementations differ by rounding. The `SCATTERS` of the
same names take one vector per rank, and return to each rank the sum of its own. XLA:TPU rewrites reduce-scatters into
all-reduces if they are over several axes at once, or if their rows are not whole tiles. `TILED_SCATTER` takes their
place there, over one axis after another; as many bytes travel as in one reduce-scatter over all axes. `sum_in_shape`
and `scatter_in_shape` are the same for arrays that are not flat vectors.

P ranks, m numbers for each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.config import registry
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.zero import ShardSpec, ranks_of

_LANES, _TILE = 128, 8 * 128


class ReduceImpl(NamedTuple):
    """An implementation in two halves. Other work can run between them."""

    start: Callable[[jax.Array, tuple[Axis, ...]], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...]], jax.Array]
    only_starts: bool = False  # whether `start` only submits the vector and returns before anything has arrived

    def __call__(self, x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
        """Run both halves."""
        return self.finish(self.start(x, axes))


class StartedSum(NamedTuple):
    """A sum over devices that has been started."""

    impl: ReduceImpl
    in_flight: tuple[Any, ...]

    def arrive(self, tie: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return its result. `tie` is applied to the array that arrives last."""
        *others, last = self.in_flight
        return self.impl.finish((*others, tie(last)))


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


def _start_tiled(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Scatter whole tiles, and return the length m with this rank's part of the sum.

    What follows a sum waits for this part as it arrives: XLA forgets that something waits for a slice or reshape of it.
    """
    length = x_Pm.shape[1]
    rest = jnp.pad(x_Pm, ((0, 0), (0, -length % _TILE)))
    for axis in axes:  # what remains are the rows for the ranks of the axes that follow
        rest = jax.lax.psum_scatter(rest.reshape(jax.lax.axis_size(axis), -1, _LANES), axis, tiled=True)
    return length, rest


TILED_SCATTER = ReduceImpl(_start_tiled, lambda started: started[1].reshape(-1)[: started[0]])


def scatter_of(name: str, platform: str) -> ReduceImpl:
    """Return the implementation of `SCATTERS` that the compiler of a platform keeps as a reduce-scatter."""
    return TILED_SCATTER if platform == "tpu" and registry.REDUCTION_FACTS[name].one_scatter else SCATTERS[name]


def sum_in_shape(name: str) -> ReduceImpl:
    """Return the implementation of `REDUCTIONS` for arrays of any shape."""
    impl = REDUCTIONS[name]
    if registry.REDUCTION_FACTS[name].any_shape:
        return impl

    def start(x: jax.Array, axes: tuple[Axis, ...]) -> tuple[Any, ...]:
        return x.shape, *impl.start(x.ravel(), axes)

    return ReduceImpl(start, lambda started: impl.finish(started[1:]).reshape(started[0]), impl.only_starts)


def scatter_in_shape(name: str, platform: str, spec: ShardSpec) -> ReduceImpl:
    """Return the implementation of `SCATTERS` for arrays that `spec` shards.

    XLA:TPU keeps its reduce-scatters if the shards are whole tiles.
    """
    if registry.REDUCTION_FACTS[name].one_scatter:
        return _blocking(lambda x, _: spec.reduce_scatter(x, platform))
    impl = SCATTERS[name]

    def start(x: jax.Array, axes: tuple[Axis, ...]) -> tuple[Any, ...]:
        ranks = ranks_of(axes)
        return spec.shape(x.shape, ranks), *impl.start(spec.by_rank(x, ranks), axes)

    return ReduceImpl(start, lambda started: impl.finish(started[1:]).reshape(started[0]), impl.only_starts)
