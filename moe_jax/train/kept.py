"""What a task keeps for its backward pass: the fewest bytes that the rest follows from without a product.

Differentiation keeps every value that some derivative reads: of a softmax the exponentials, and the quotients in
bfloat16 once more for the product behind it. What a pass over kept values makes need not be kept, so what to keep is a
minimum cut between what takes more than a pass (products, sums, gathers, exchanges) and what derivatives read.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from moe_jax.train.jaxprs import evaluate, value_of

# Operations that XLA fuses into what reads their results.
_PASSES = {
    *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "iota", "select_n"),
    *("add", "sub", "mul", "div", "neg", "max", "min", "square", "integer_pow", "sqrt", "rsqrt"),
    *("exp", "logistic", "tanh", "erf", "sin", "cos", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"),
}
# What a byte counts that is written only to be kept. With 1, a softmax would keep its logits less their maximum rather
# than its logits and their maximum; but logits are written anyway, as the result of a product.
_WRITTEN_TO_KEEP = 1.25
_UNIT = 1024  # bytes in a unit of flow, which is an int32


def keep_least(
    program: ClosedJaxpr, num_kept: int
) -> tuple[list[Var], Callable[[Sequence[jax.Array], jax.Array], list[jax.Array]]]:
    """Of a program without calls whose last `num_kept` results are kept: what to keep instead, and a function.

    The function makes these results of the values kept instead, not before its second argument exists.
    """
    jaxpr = program.jaxpr
    others, results = jaxpr.outvars[: -num_kept or None], jaxpr.outvars[len(jaxpr.outvars) - num_kept :]
    kept = smallest(jaxpr.eqns, _variables(results), _variables(others))
    again = _between(kept, results, jaxpr.eqns)
    read = {var for eqn in again for var in _variables(eqn.invars)}

    def make(values: Sequence[jax.Array], dependency: jax.Array) -> list[jax.Array]:
        known = dict(zip(kept, values, strict=True))
        made = dict(known)
        for var in filter(read.__contains__, kept):
            # else XLA would merge the second computation with the first, and keep what that made
            made[var] = jax.lax.optimization_barrier((known[var], dependency))[0]
        evaluate(again, made)
        return [value_of(made | known, var) for var in results]

    return kept, make


def smallest(eqns: Sequence[JaxprEqn], wanted: Sequence[Var], written: Sequence[Var]) -> list[Var]:
    """The fewest bytes that `wanted` follow from; the last of several choices. `written` exist whether kept or not."""
    maker = {var: eqn for eqn in eqns for var in eqn.outvars}
    place: dict[Var, int] = {}  # of all that `wanted` is made of
    todo = list(wanted)
    while todo:
        var = todo.pop()
        if var not in place:
            place[var] = len(place)
            todo += _made_from(var, maker) or ()
    source, sink = 2 * len(place), 2 * len(place) + 1
    through = [(2 * i, 2 * i + 1, cost(var, maker, written)) for var, i in place.items()]
    unlimited = sum(size for *_, size in through) + 1
    edges = [*through, *((2 * place[var] + 1, sink, unlimited) for var in dict.fromkeys(wanted))]
    for var, i in place.items():
        parts = _made_from(var, maker)
        edges += [(source, 2 * i, unlimited)] if parts is None else []
        edges += [(2 * place[part] + 1, 2 * i, unlimited) for part in dict.fromkeys(parts or ())]
    tails, heads, sizes = np.array(edges, np.int32).reshape(-1, 3).T
    graph = coo_array((sizes, (tails, heads)), shape=(sink + 1, sink + 1)).tocsr()
    left = (graph - maximum_flow(graph, source, sink).flow).T.tocsr()
    left.eliminate_zeros()
    behind = set(breadth_first_order(left, sink, return_predecessors=False).tolist())
    return [var for var, i in place.items() if 2 * i + 1 in behind and 2 * i not in behind]


def cost(var: Var, maker: dict[Var, JaxprEqn], written: Sequence[Var]) -> int:
    """Of keeping a value, in units of 1,024 bytes."""
    factor = 1 if _made_from(var, maker) is None or var in written else _WRITTEN_TO_KEEP
    value: Any = var.aval
    return math.ceil(factor * value.size * value.dtype.itemsize / _UNIT)


def _made_from(var: Var, maker: dict[Var, JaxprEqn]) -> list[Var] | None:
    """What a pass makes a value from; None if it takes more than a pass, or the value is given."""
    eqn = maker.get(var)
    return None if eqn is None or eqn.primitive.name not in _PASSES else _variables(eqn.invars)


def _between(kept: Sequence[Var], results: Iterable[Var | Literal], eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The operations that make results of what is kept, in order."""
    wanted = set(_variables(results)) - set(kept)
    found = []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            found.append(eqn)
            wanted |= set(_variables(eqn.invars)) - set(kept)
    return found[::-1]


def _variables(operands: Iterable[Var | Literal]) -> list[Var]:
    return [operand for operand in operands if isinstance(operand, Var)]
