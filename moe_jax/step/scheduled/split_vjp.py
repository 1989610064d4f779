"""Backward passes whose weight gradients can be deferred (zero-bubble B and W passes).

Differentiating y = x·W gives two products: dX = dY·Wᵀ, which the block below waits for, and dW = Xᵀ·dY, which nothing
waits for. The pullback of a whole task is split by what each of its operations is needed for: first everything that
input gradients need, later the rest. No operation runs twice. Gradients of vectors, such as norms, are also computed
first: they are sums over values that exist at that point, and deferring them would mean saving these values in float32.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var
from jax.tree_util import Partial, PyTreeDef

from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.jaxpr_utils import evaluate, inlined, needed_for, value_of, values_of, variables
from moe_jax.step.scheduled.min_cut_remat import cut_residuals

Pullback = Callable[[Sequence[jax.Array]], tuple[Tree, list[jax.Array]]]
_MATRIX_DIMS = 2


def is_float(leaf: Any) -> bool:
    """Whether a leaf of a tree has a gradient."""
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact))


def floats_of(tree: Tree) -> list[jax.Array]:
    """Return the leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def with_floats(tree: Tree, floats: Sequence[jax.Array]) -> Tree:
    """Return a tree with the leaves that have gradients replaced, in order."""
    leaves, structure = jax.tree.flatten(tree)
    new = iter(floats)
    return jax.tree.unflatten(structure, [next(new) if is_float(leaf) else leaf for leaf in leaves])


def differentiate(
    function: Callable[[Tree, Tree], Tree], weights: Tree, inputs: Tree, *, min_cut: bool = False
) -> tuple[Tree, Pullback]:
    """Return `function(weights, inputs)` and its pullback: cotangents of the result's float leaves → gradients of the
    weights and of the inputs' float leaves. Leaves that are not floats pass through without a gradient.

    `min_cut`: the pullback saves as little as possible, see `min_cut_remat.cut_residuals`.
    """
    traced: list[tuple[PyTreeDef, list[bool]]] = []

    def on_floats(weights: Tree, floats: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves, structure = jax.tree.flatten(function(weights, with_floats(inputs, floats)))
        traced.append((structure, [is_float(leaf) for leaf in leaves]))
        return floats_of(leaves), [leaf for leaf in leaves if not is_float(leaf)]

    pull: Any = _min_cut_vjp if min_cut else partial(jax.vjp, has_aux=True)
    floats, pullback, others = pull(on_floats, weights, floats_of(inputs))
    structure, kinds = traced[-1]
    of_kind = {True: iter(floats), False: iter(others)}
    return jax.tree.unflatten(structure, [next(of_kind[kind]) for kind in kinds]), pullback


class _Forward(NamedTuple):
    """The structure of a traced forward pass, which returns results, values without gradients, and residuals as flat
    lists.
    """

    num_results: int
    num_residuals: int
    structure: PyTreeDef  # the pullback's tree, of which residuals are the leaves


def _min_cut_vjp(
    function: Callable[[Tree, list[jax.Array]], Any], weights: Tree, floats: list[jax.Array]
) -> tuple[list[jax.Array], Pullback, list[jax.Array]]:
    """Like `jax.vjp` with `has_aux`, but the pullback saves less."""
    traced: list[_Forward] = []

    def forward(weights: Tree, floats: list[jax.Array]) -> list[Any]:
        results, pullback, others = jax.vjp(function, weights, floats, has_aux=True)
        residuals, structure = jax.tree.flatten(pullback)
        traced.append(_Forward(len(results), len(residuals), structure))
        return [*results, *others, *residuals]

    program = inlined(jax.make_jaxpr(forward)(weights, floats))
    num_results, num_residuals, structure = traced[-1]
    cut, remake = cut_residuals(program, num_residuals)
    values = values_of(program, jax.tree.leaves((weights, floats)))
    evaluate(program.jaxpr.eqns, values)
    outputs = [value_of(values, var) for var in program.jaxpr.outvars[: len(program.jaxpr.outvars) - num_residuals]]

    def pull(residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> Any:
        return jax.tree.unflatten(structure, remake(residuals, cotangents[0]))(cotangents)

    return outputs[:num_results], Partial(pull, [values[var] for var in cut]), outputs[num_results:]


class SplitBackward:
    """One call of a pullback in two parts. Both parts run in one trace, or in two with `residuals` and
    `with_residuals`.
    """

    def __init__(
        self,
        pullback: Pullback,
        cotangents: Sequence[jax.Array],
        replacements: Iterable[tuple[jax.Array, jax.Array]] = (),
    ):
        """`replacements` are pairs of a value that the pullback has saved, and a value to use in its place."""
        traced, shapes = jax.make_jaxpr(lambda *ct: pullback(list(ct)), return_shape=True)(*cotangents)
        traced = inlined(traced)
        jaxpr = traced.jaxpr
        new_of = {id(old): new for old, new in replacements}
        assert new_of.keys() <= set(map(id, traced.consts)), "the pullback does not keep what is to be replaced"
        consts = [new_of.get(id(value), value) for value in traced.consts]
        self._values = values_of(ClosedJaxpr(jaxpr, consts), cotangents)
        weight_shapes, input_shapes = shapes
        shapes_of_weights = jax.tree.leaves(weight_shapes)
        num_weights = len(shapes_of_weights)
        self._structures = jax.tree.structure(weight_shapes), jax.tree.structure(input_shapes)
        self._weight_vars, self._input_vars = jaxpr.outvars[:num_weights], jaxpr.outvars[num_weights:]
        self._cotangents = jaxpr.invars
        weights = zip(self._weight_vars, shapes_of_weights, strict=True)
        vectors = [var for var, like in weights if like.ndim < _MATRIX_DIMS]
        self._first = needed_for([*self._input_vars, *vectors], jaxpr.eqns)
        first = set(map(id, self._first))
        self._rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in first]

    def inputs(self) -> Any:
        """Return the gradients of the inputs; must be called before `weights`."""
        evaluate(self._first, self._values)
        return jax.tree.unflatten(self._structures[1], [value_of(self._values, var) for var in self._input_vars])

    def residuals(self) -> list[jax.Array]:
        """Return what `weights` reads; must be called after `inputs`."""
        return [self._values[var] for var in self._read]

    def with_residuals(self, values: Sequence[jax.Array]) -> "SplitBackward":
        """Return the same call in another trace, with these values of `residuals`."""
        other = copy.copy(self)
        other._values = dict(zip(self._read, values, strict=True))
        return other

    @property
    def _read(self) -> list[Var]:
        """The variables that `weights` reads, in the same order on all processes."""
        made = {var for eqn in self._rest for var in eqn.outvars}
        read = variables([operand for eqn in self._rest for operand in eqn.invars] + list(self._weight_vars))
        return list(dict.fromkeys(var for var in read if var not in made))

    def weights(self, tie: Callable[[jax.Array], jax.Array]) -> Tree:
        """Return the gradients of the weights: run all operations that `inputs` did not need.

        `tie` is applied to every cotangent that they are computed from, to delay them.
        """
        made = {var for eqn in self._first for var in eqn.outvars} | set(self._cotangents)
        for var in filter(made.__contains__, self._read):
            if self._values[var].size and is_float(self._values[var]):
                self._values[var] = tie(self._values[var])
        evaluate(self._rest, self._values)
        return jax.tree.unflatten(self._structures[0], [value_of(self._values, var) for var in self._weight_vars])
