"""Choose what a scan iteration over blocks saves for its backward pass: as little as possible."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import PyTreeDef

from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.jaxpr_utils import body_of_call, communicates, needed_for, value_of, variables


class BlockConsts(NamedTuple):
    """The inputs of some blocks' tasks besides the residual stream: the constants of a scan body."""

    blocks: dict[int, Tree]  # weights, by the block's number
    router_inputs: RouterInputs | None = None  # what gates read besides features, before these blocks
    placements: Mapping[int, jax.Array] = MappingProxyType({})  # placement of a block's experts, if not in order
    document_BN: jax.Array | None = None  # the document of each token of whole sequences; None: all are of one
    shards: dict[int, Tree] | None = None  # of blocks whose weights are gathered while these ones compute

    def documents(self, count: int) -> list[jax.Array | None]:
        """Return the documents of each of `count` equal parts of the sequences."""
        return [None] * count if self.document_BN is None else list(jax.numpy.split(self.document_BN, count))


class ScanBody:
    """A scan body `function(carry, consts)` → carry, results, saved; it is traced once.

    The returned carry may have another structure than the input.

    A value that several leaves of `saved` share is stacked once. Values that only depend on `consts` (weights, their
    casts, masks, random numbers) are not stacked: `rebuild` recomputes them. Results of collectives are stacked,
    too, such as the sizes of exchanges with a gate that reads no features: repeating a collective would cost time, and
    it would run concurrently with others.
    """

    def __init__(self, function: Callable[[Tree, Tree], tuple[Tree, Tree, Tree]], carry: Tree, consts: Tree):
        structures: list[PyTreeDef] = []  # trees of carry, results and saved

        def flat(carry: Tree, consts: Tree) -> list[jax.Array]:
            leaves, structure = zip(*map(jax.tree.flatten, function(carry, consts)), strict=True)
            structures[:] = structure
            return [leaf for part in leaves for leaf in part]

        self._traced = jax.make_jaxpr(flat)(carry, consts)
        self._of_carry, self._of_results, self._of_saved = structures
        self._num_carry, self._num_carried = len(jax.tree.leaves(carry)), self._of_carry.num_leaves
        jaxpr, num_saved = self._traced.jaxpr, self._of_saved.num_leaves
        moving = _depend(jaxpr.invars[: self._num_carry], jaxpr.eqns)
        self._saved = jaxpr.outvars[len(jaxpr.outvars) - num_saved :]
        of_place = {var: i for i, var in enumerate(jaxpr.outvars) if isinstance(var, Var)}
        saved = dict.fromkeys(variables(self._saved))
        self._stacked = [var for var in saved if var in moving]
        self._places = [of_place[var] for var in self._stacked]
        self._fixed = [var for var in saved if var not in moving]
        wanted = set(map(of_place.__getitem__, self._fixed))
        # `dce_jaxpr` alone would keep all Pallas kernels, and so the carry that they read
        needed = jaxpr.replace(eqns=needed_for(self._fixed, jaxpr.eqns))
        of_consts, self._used = dce_jaxpr(needed, [i in wanted for i in range(len(jaxpr.outvars))])
        self._fixed = [var for i, var in enumerate(jaxpr.outvars) if i in wanted]
        self._of_consts = jaxpr_as_fun(ClosedJaxpr(of_consts, self._traced.consts))

    @property
    def stacked_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the values to stack."""
        avals: list[Any] = [var.aval for var in self._stacked]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    @property
    def stacked_inputs(self) -> list[int | None]:
        """For each value to stack, the number of the leaf of the input carry that it is identical to, or None."""
        place = {var: i for i, var in enumerate(self._traced.jaxpr.invars[: self._num_carry])}
        return [place.get(var) for var in self._stacked]

    def __call__(self, carry: Tree, consts: Tree) -> tuple[Tree, Tree, list[jax.Array]]:
        """Return the carry, the results, and the values to stack."""
        out = jaxpr_as_fun(self._traced)(*jax.tree.leaves((carry, consts)))
        results = out[self._num_carried : len(out) - len(self._saved)]
        return (
            jax.tree.unflatten(self._of_carry, out[: self._num_carried]),
            jax.tree.unflatten(self._of_results, results),
            [out[place] for place in self._places],
        )

    def stacked_of(self, saved: Tree) -> list[jax.Array]:
        """Return the values to stack, from the `saved` of a function that computes the same in another order."""
        leaves, traced = jax.tree.leaves(saved), list(self._saved)
        assert len(leaves) == len(traced), "another function"
        return [leaves[traced.index(var)] for var in self._stacked]

    def rebuild(self, consts: Tree, stacked: Sequence[jax.Array]) -> Tree:
        """Return `saved` of an iteration, from its `consts` and its stacked values."""
        unused = [None] * self._num_carry
        inputs = [*unused, *jax.tree.leaves(consts)]
        fixed = self._of_consts(*(leaf for leaf, used in zip(inputs, self._used, strict=True) if used))
        values = dict(zip(self._fixed, fixed, strict=True)) | dict(zip(self._stacked, stacked, strict=True))
        leaves = [value_of(values, var) for var in self._saved]
        return jax.tree.unflatten(self._of_saved, leaves)


def _depend(sources: Sequence[Var], eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Return the sources, the results of collectives, and everything computed from these, including inside calls."""
    moving = set(sources)
    for eqn in eqns:
        from_moving = [isinstance(var, Var) and var in moving for var in eqn.invars]
        call = body_of_call(eqn)
        if call is None:
            if any(from_moving) or communicates(eqn):
                moving.update(eqn.outvars)
            continue
        body = call.jaxpr
        inside = _depend([var for var, moves in zip(body.invars, from_moving, strict=True) if moves], body.eqns)
        moving.update(
            out for out, var in zip(eqn.outvars, body.outvars, strict=True) if isinstance(var, Var) and var in inside
        )
    return moving
