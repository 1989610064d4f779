"""Traced programs, operation by operation."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var


def inlined(traced: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without calls, so that operations inside them can be told apart."""

    def run(*inputs: Any) -> list[Any]:
        values = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(traced.jaxpr.invars, inputs, strict=True))
        evaluate(traced.jaxpr.eqns, values)
        return [value_of(values, var) for var in traced.jaxpr.outvars]

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.invars))


def evaluate(eqns: Sequence[JaxprEqn], values: dict[Var, Any]) -> None:
    """Run operations in order; `values` holds what they read, and gets what they make."""
    for eqn in eqns:
        inputs = [value_of(values, var) for var in eqn.invars]
        inner = _body_of_call(eqn)
        if inner is not None:
            called = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
            if eqn.params.get("prevent_cse"):  # a second computation that must not be merged with the first
                inputs = jax.lax.optimization_barrier(inputs)
            called |= dict(zip(inner.jaxpr.invars, inputs, strict=True))
            evaluate(inner.jaxpr.eqns, called)
            outputs = [value_of(called, var) for var in inner.jaxpr.outvars]
        else:
            outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))


def value_of(values: dict[Var, Any], var: Any) -> Any:
    """Of a variable or literal."""
    return var.val if isinstance(var, Literal) else values[var]


def _body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What a jit or checkpoint calls; None for everything else."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "checkpoint", "remat2"):
        return None
    body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
