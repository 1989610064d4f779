"""Choose the residuals that a task saves for its backward pass: the fewest bytes from which fused operations recompute
the others.

Differentiation saves every value that some derivative reads: for a softmax the exponentials in float32, and the
quotients again in bfloat16 for the product after it. Elementwise operations are fused into the operations that read
them, so recomputing them is cheap. The best set of saved values is therefore a minimum cut of the forward program,
between expensive operations (matrix products, sums, gathers, exchanges) and the residuals, as in PyTorch's AOTAutograd
(`min_cut_rematerialization_partition`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from moe_jax.step.scheduled.jaxpr_utils import evaluate, needed_for, value_of, variables

_FUSED = {
    *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "select_n"),
    *("add", "sub", "mul", "div", "neg", "max", "min", "square", "integer_pow", "sqrt", "rsqrt"),
    "one_minus_square",  # from jax 0.12 on, in the derivative of tanh
    *("exp", "logistic", "tanh", "erf", "sin", "cos", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"),
}
# The cost of a byte that is written only to be saved. With 1, a softmax would save its logits minus their maximum
# instead of its logits and their maximum; but logits are written anyway, as the result of a product.
_WRITTEN_TO_KEEP = 1.25
_UNIT = 1024  # bytes in a unit of flow, which is an int32

Makers = dict[Var, JaxprEqn]


def cut_residuals(
    program: ClosedJaxpr, num_residuals: int
) -> tuple[list[Var], Callable[[Sequence[jax.Array], jax.Array], list[jax.Array]]]:
    """Return the values to save, and a function that recomputes the residuals from them.

    `program` has no calls, and its last results are the residuals. The function's second argument is an array that has
    to exist before anything is recomputed. A float32 weight is treated like any other value, so its cast is saved: a
    separate cast for each direction would be written twice.
    """
    jaxpr = program.jaxpr
    outputs, residuals = jaxpr.outvars[: -num_residuals or None], jaxpr.outvars[len(jaxpr.outvars) - num_residuals :]
    saved = smallest_cut(jaxpr.eqns, variables(residuals), variables(outputs))
    again = needed_for(residuals, jaxpr.eqns, saved)
    read = {var for eqn in again for var in variables(eqn.invars)}

    def remake(values: Sequence[jax.Array], dependency: jax.Array) -> list[jax.Array]:
        known = dict(zip(saved, values, strict=True))
        made = dict(known)
        for var in filter(read.__contains__, saved):
            # else XLA would merge the recomputation with the first computation, and save its results
            made[var] = jax.lax.optimization_barrier((known[var], dependency))[0]
        evaluate(again, made)
        return [value_of(made | known, var) for var in residuals]

    return saved, remake


def smallest_cut(eqns: Sequence[JaxprEqn], wanted: Sequence[Var], written: Sequence[Var]) -> list[Var]:
    """Return the cheapest set of values from which `wanted` can be computed; of several such sets, the one nearest to
    `wanted`.

    `written` values are in memory whether they are saved or not.
    """
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    values = _made_of(wanted, makers)
    source, sink = 2 * len(values), 2 * len(values) + 1
    front = {var: 2 * i for i, var in enumerate(values)}  # a value is two nodes; the edge between them is its cost
    back = {var: node + 1 for var, node in front.items()}
    edges = [(front[var], back[var], cost(var, makers, written)) for var in values]
    unlimited = sum(size for *_, size in edges) + 1
    edges += [(back[var], sink, unlimited) for var in dict.fromkeys(wanted)]
    for var in values:
        parts = _parts(var, makers)
        edges += [(source, front[var], unlimited)] if parts is None else []
        edges += [(back[part], front[var], unlimited) for part in dict.fromkeys(parts or ())]
    sink_side = _nodes_of_sink(edges, source, sink)
    return [var for var in values if back[var] in sink_side and front[var] not in sink_side]


def cost(var: Var, makers: Makers, written: Sequence[Var]) -> int:
    """Return the cost of saving a value, in units of 1,024 bytes."""
    factor = 1 if _parts(var, makers) is None or var in written else _WRITTEN_TO_KEEP
    value: Any = var.aval
    return math.ceil(factor * value.size * value.dtype.itemsize / _UNIT)


def _nodes_of_sink(edges: Sequence[tuple[int, int, int]], source: int, sink: int) -> set[int]:
    """Return the nodes from which more flow could still reach the sink at maximum flow."""
    from scipy.sparse import coo_array  # takes a tenth of a second, and most runs do not need it
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    tails, heads, sizes = np.array(edges, np.int32).reshape(-1, 3).T
    graph = coo_array((sizes, (tails, heads)), shape=(sink + 1, sink + 1)).tocsr()
    left = (graph - maximum_flow(graph, source, sink).flow).T.tocsr()
    left.eliminate_zeros()
    return set(breadth_first_order(left, sink, return_predecessors=False).tolist())


def _made_of(wanted: Sequence[Var], makers: Makers) -> list[Var]:
    """Return all values from which fused operations compute `wanted`, directly or indirectly."""
    found: dict[Var, None] = {}
    todo = list(wanted)
    while todo:
        var = todo.pop()
        if var not in found:
            found[var] = None
            todo += _parts(var, makers) or ()
    return list(found)


def _parts(var: Var, makers: Makers) -> list[Var] | None:
    """Return the inputs of the fused operation that computes a value; None if another operation computes it, or if it
    is an input.
    """
    eqn = makers.get(var)
    return None if eqn is None or eqn.primitive.name not in _FUSED else variables(eqn.invars)
