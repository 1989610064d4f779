"""Variants of a traced program for benchmarks: without its communication, and its communication alone."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.sharding import Mesh

from moe_jax.parallel import background
from moe_jax.parallel.host_call import host_call_p
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sharding import REPLICATED

_FUNCTIONS = ("all_to_all", "ragged_all_to_all", "psum", "ppermute", "psum_scatter", "all_gather")
_FEW = 64  # numbers of a collective that stays
_PRIMITIVES = {"all_to_all", "ragged_all_to_all", "psum", "psum_invariant", "ppermute", "reduce_scatter", "all_gather"}


@contextmanager
def without_communication(keep: Axis | None = None) -> Iterator[None]:
    """Within this context, trace programs with a local operation of equal result shape in place of every collective,
    except those of XLA over the axis `keep`, if there is one, and then those of few numbers, as norms and metrics.
    """
    originals: dict[str, Callable[..., Any]] = {name: getattr(jax.lax, name) for name in _FUNCTIONS}
    in_background = {name: getattr(background, name) for name in ("start", "start_after", "finish")}

    def stand_in(collective: Callable[..., Any], tree: Any, *args: Any, **options: Any) -> Any:
        is_small = sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(tree)) <= _FEW
        if keep is not None and (is_small or (args and args[0] == keep)):
            return collective(tree, *args, **options)

        def local(x: jax.Array) -> jax.Array:
            shape = jax.eval_shape(lambda x: collective(x, *args, **options), x).shape
            return _resized(x, math.prod(shape)).reshape(shape)

        return jax.tree.map(local, tree)

    try:
        for name, collective in originals.items():
            setattr(
                jax.lax, name, lambda *args, collective=collective, **options: stand_in(collective, *args, **options)
            )
        stand_ins: dict[str, Callable[..., Any]] = {
            "start": lambda x, *_: x,
            "start_after": lambda x, *_: x,
            "finish": lambda x, result: _resized(x, math.prod(result.shape)).reshape(result.shape),
        }
        for name, replaced in stand_ins.items():
            setattr(background, name, replaced)
        yield
    finally:
        for name, original in in_background.items():
            setattr(background, name, original)
        for name, collective in originals.items():
            setattr(jax.lax, name, collective)


def _resized(x: jax.Array, size: int) -> jax.Array:
    repeats = -(-size // max(x.size, 1))
    return (jnp.tile(x.ravel(), repeats) if repeats > 1 else x.ravel())[:size]


class Collective(NamedTuple):
    """One collective of a traced program."""

    primitive: Primitive
    options: dict[str, Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the operand on each device."""
        first = int(self.primitive is host_call_p)  # the first operand is the device's own index
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.operands[first:])


def collectives_of(jaxpr: Jaxpr | ClosedJaxpr) -> list[Collective]:
    """Return the collectives of a traced program in program order, those of a scan's body once for every iteration.

    Those in the background that send on the result of another one are left out.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    found: list[Collective] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in _PRIMITIVES or _starts_in_background(equation):
            shapes = tuple(jax.ShapeDtypeStruct(*_shape_and_dtype(x.aval)) for x in equation.invars)
            found.append(Collective(equation.primitive, equation.params, shapes))
            continue
        iterations = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                found += collectives_of(value) * iterations
    return found


def _starts_in_background(equation: Any) -> bool:
    # the operands are the device and an array; a number alone is the handle of an earlier collective
    return equation.primitive is host_call_p and len(equation.invars) == 2 and bool(equation.invars[1].aval.shape)


def _shape_and_dtype(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def communication(collectives: list[Collective], mesh: Mesh) -> jax.stages.Wrapped:
    """Return a program over the mesh that runs these collectives one after another, and nothing else."""
    platform = mesh.devices.flat[0].platform

    def run() -> jax.Array:
        last = jnp.float32(jax.lax.axis_index(Axis.EXPERT))  # a value that the compiler cannot know
        for collective in collectives:
            operands = [jnp.zeros(x.shape, x.dtype) for x in collective.operands]
            operands[-1] = depend_on(operands[-1], last, platform)
            if in_background := collective.primitive is host_call_p:
                operands[0] = jax.lax.axis_index(mesh.axis_names)
            results = collective.primitive.bind(*operands, **collective.options)
            last = results[0] if collective.primitive.multiple_results else results
            if in_background:
                last = background.finish(last, collective.operands[-1])
        return last.ravel()[:1]

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=REPLICATED, check_vma=False))
