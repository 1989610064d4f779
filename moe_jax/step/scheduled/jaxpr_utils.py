"""Inspect and evaluate jaxprs (traced programs), equation by equation."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from moe_jax.parallel.host_call import host_call_p

Values = dict[Var, Any]


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return an equivalent program with all calls inlined, so that the operations inside them are visible."""

    def run(*inputs: Any) -> list[Any]:
        values = values_of(program, inputs)
        evaluate(program.jaxpr.eqns, values)
        return [value_of(values, var) for var in program.jaxpr.outvars]

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars))


def values_of(program: ClosedJaxpr, inputs: Iterable[Any]) -> Values:
    """Return the values of a program's constants and inputs, by variable."""
    values: Values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    return values | dict(zip(program.jaxpr.invars, inputs, strict=True))


def evaluate(eqns: Iterable[JaxprEqn], values: Values) -> None:
    """Run equations in order, in their scopes; `values` holds their inputs and receives their results."""
    for eqn in eqns:
        inputs = [value_of(values, var) for var in eqn.invars]
        body = body_of_call(eqn)
        scope = str(eqn.source_info.name_stack)
        with jax.named_scope(scope), eqn.ctx.manager:
            if body is not None:
                if eqn.params.get("prevent_cse"):  # rematerialization, not to be merged with the first computation
                    inputs = jax.lax.optimization_barrier(inputs)
                called = values_of(body, inputs)
                evaluate(body.jaxpr.eqns, called)
                outputs = [value_of(called, var) for var in body.jaxpr.outvars]
            else:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))


def needed_for(wanted: Iterable[Any], eqns: Sequence[JaxprEqn], known_vars: Iterable[Var] = ()) -> list[JaxprEqn]:
    """Return the equations, in order, that compute `wanted` from `known_vars` and the program's inputs."""
    known = set(known_vars)
    missing = set(variables(wanted)) - known
    needed = []
    for eqn in reversed(eqns):
        if missing.intersection(eqn.outvars):
            needed.append(eqn)
            missing |= set(variables(eqn.invars)) - known
    return needed[::-1]


def variables(operands: Iterable[Any]) -> list[Var]:
    """Return the operands that are variables, not literals."""
    return [operand for operand in operands if isinstance(operand, Var)]


def value_of(values: Values, var: Any) -> Any:
    """Return the value of a variable or literal."""
    return var.val if isinstance(var, Literal) else values[var]


def body_of_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that a jit or checkpoint equation calls; None for other equations."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "checkpoint", "remat2"):
        return None
    body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or a program inside it, sends anything to other devices."""
    if eqn.primitive is host_call_p:
        return True
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    named = any(isinstance(axis, str) for axis in ([axes] if isinstance(axes, str) else axes or ()))
    if named and eqn.primitive.name != "axis_index":
        return True
    return any(communicates(inner) for program in jaxprs_in_params(eqn.params) for inner in program.eqns)
