"""Traced programs, operation by operation."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

Values = dict[Var, Any]


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without calls, so that operations inside them can be told apart."""

    def run(*inputs: Any) -> list[Any]:
        values = values_of(program, inputs)
        evaluate(program.jaxpr.eqns, values)
        return [value_of(values, var) for var in program.jaxpr.outvars]

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars))


def values_of(program: ClosedJaxpr, inputs: Iterable[Any]) -> Values:
    """What a program's operations start from."""
    values: Values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    return values | dict(zip(program.jaxpr.invars, inputs, strict=True))


def evaluate(eqns: Iterable[JaxprEqn], values: Values) -> None:
    """Run operations in order, in their scopes; `values` holds what they read, and gets what they make."""
    for eqn in eqns:
        inputs = [value_of(values, var) for var in eqn.invars]
        body = body_of_call(eqn)
        scope = str(eqn.source_info.name_stack)
        with jax.named_scope(scope), eqn.ctx.manager:
            if body is not None:
                if eqn.params.get("prevent_cse"):  # a second computation that must not be merged with the first
                    inputs = jax.lax.optimization_barrier(inputs)
                called = values_of(body, inputs)
                evaluate(body.jaxpr.eqns, called)
                outputs = [value_of(called, var) for var in body.jaxpr.outvars]
            else:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))


def needed_for(wanted: Iterable[Any], eqns: Sequence[JaxprEqn], known_vars: Iterable[Var] = ()) -> list[JaxprEqn]:
    """The operations, in order, that `wanted` is made by from `known_vars` and a program's inputs."""
    known = set(known_vars)
    missing = set(variables(wanted)) - known
    needed = []
    for eqn in reversed(eqns):
        if missing.intersection(eqn.outvars):
            needed.append(eqn)
            missing |= set(variables(eqn.invars)) - known
    return needed[::-1]


def variables(operands: Iterable[Any]) -> list[Var]:
    """Those that are no literals."""
    return [operand for operand in operands if isinstance(operand, Var)]


def value_of(values: Values, var: Any) -> Any:
    """Of a variable or literal."""
    return var.val if isinstance(var, Literal) else values[var]


def body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What a jit or checkpoint calls; None for everything else."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "checkpoint", "remat2"):
        return None
    body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
