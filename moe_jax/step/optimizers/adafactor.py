"""Adafactor (Shazeer and Stern 2018): AdamW's squares of a matrix, kept as means of its rows and of its columns.

There is no first moment, and an update is not scaled by the size of its parameter, so that learning rates are those of
AdamW (Zhai et al. 2022, section 3.3). Other arrays than matrices have all their squares. Rows, columns and the limit of
an update are those of each block's and each expert's own matrix, whatever arrays they are stacked in.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from moe_jax.config import OptimizerConfig
from moe_jax.config.facts import OptimizerFacts
from moe_jax.parallel.matrix_shards import mean_over
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.step.optimizers.protocol import Parameter, all_after, unless_bad

FACTS = OptimizerFacts(listed=3, moments=1, hidden_matrix_moments=0, end_matrix_moments=0)
_EXPONENT = 0.8  # in step t squares are averaged with the weight t^-0.8 of the newest
_SMALLEST = 1e-30  # added to squares
_MOST_RMS = 1.0  # of an update


def scale(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    """Return Adafactor.

    The state has means of squares over columns (`v_row`) and over rows (`v_col`), of size 1 there, and the squares of
    other arrays (`v`). A tree has no leaf where another one has the parameter's.
    """

    def init(params: optax.Params) -> optax.FactoredState:
        def zeros(which: str) -> optax.Updates:
            return jax.tree.map(lambda p, parameter: _first(p, parameter, which), params, parameters)

        return optax.FactoredState(jnp.zeros([], jnp.int32), zeros("row"), zeros("column"), zeros("whole"))

    def update(
        grads: optax.Updates,
        state: optax.FactoredState,
        params: optax.Params | None = None,
        *,
        is_good: jax.Array,
        **_: Any,
    ) -> tuple[optax.Updates, optax.FactoredState]:
        weight = (state.count + 1).astype(jnp.float32) ** -_EXPONENT
        found: list[tuple[jax.Array, Any, Any, Any]] = []
        leaves, structure = jax.tree.flatten(grads)
        trees = (parameters, state.v_row, state.v_col, state.v)
        of_leaves = (structure.flatten_up_to(tree) for tree in trees)  # type: ignore[attr-defined]
        for g, parameter, *moments in zip(leaves, *of_leaves, strict=True):
            if found and platform == "cpu":  # where all devices must come to collectives in one order
                g = depend_on(g, found[-1][0], platform)
            found.append(_updated(g, moments, parameter, weight, is_good))
        updates, *moved = (jax.tree.unflatten(structure, each) for each in zip(*found, strict=True))
        return all_after(found[-1][0], updates, platform), optax.FactoredState(state.count + 1, *moved)

    return optax.GradientTransformationExtraArgs(init, update)


def _first(p: jax.Array, parameter: Parameter, which: str) -> jax.Array | optax.MaskedNode:
    """Return the first moment of a kind of a parameter, or no leaf."""
    matrix = parameter.matrix
    if (matrix is None) != (which == "whole"):
        return optax.MaskedNode()
    dims = () if matrix is None else matrix.columns if which == "row" else matrix.rows
    return jnp.zeros([1 if dim in dims else size for dim, size in enumerate(p.shape)], p.dtype)


def _updated(
    g: jax.Array, moments: list[Any], parameter: Parameter, weight: jax.Array, is_good: jax.Array
) -> tuple[jax.Array, Any, Any, Any]:
    """Return this device's shard of an array's update, and its moments."""
    matrix, spec = parameter.matrix, parameter.spec
    row, column, whole = moments
    square = jnp.square(g) + _SMALLEST

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        return unless_bad(is_good, (1 - weight) * old + weight * new, old)

    if matrix is None:
        whole = moved(whole, square)
        update = g * jax.lax.rsqrt(whole)
    else:
        row = moved(row, mean_over(square, matrix.columns, spec))
        column = moved(column, mean_over(square, matrix.rows, spec))
        update = g * jax.lax.rsqrt(row / mean_over(row, matrix.rows, spec)) * jax.lax.rsqrt(column)
    rms = jnp.sqrt(mean_over(jnp.square(update), parameter.unstacked, spec))
    return update / jnp.maximum(1.0, rms / _MOST_RMS), row, column, whole
