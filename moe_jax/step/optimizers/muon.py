"""Muon (Jordan et al. 2024): the momentum of each matrix, orthogonalized; AdamW for all other parameters.

Matrices are those of each block and of each expert by themselves; attention's projections are [D, heads × width]. The
embedding, the head and gates are AdamW's, like vectors. An update has the RMS of AdamW's updates, 0.2 or so (Liu et al.
2025, Muon is Scalable for LLM Training, section 2.2), so that both share the learning rate and the weight decay.

Newton-Schulz iterations make a matrix nearly orthogonal by matrix products alone. Five iterations move all singular
values to between 0.7 and 1.2 or so, except tiny ones.

n matrices [r, c].
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from moe_jax.config import OptimizerConfig
from moe_jax.config.facts import OptimizerFacts
from moe_jax.parallel.matrix_shards import on_whole_matrices
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.step.optimizers import adamw
from moe_jax.step.optimizers.protocol import Parameter, all_after, unless_bad

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵, where x is a singular value
_EPS = 1e-7  # added to the norm, so that zeros stay zeros
_NUMBERS_AT_ONCE = 2**26  # of the matrices that are in memory in several copies at a time


def orthogonalized(x_nrc: Float[Array, "n r c"], steps: int) -> Float[Array, "n r c"]:
    """Return the matrices after so many iterations, whose products have operands of the type of the matrices."""
    _, r, c = x_nrc.shape
    if r > c:  # the square matrices of an iteration have the size of the rows
        return orthogonalized(x_nrc.swapaxes(1, 2), steps).swapaxes(1, 2)
    at_once = max(1, _NUMBERS_AT_ONCE // (r * c))
    if len(x_nrc) <= at_once:
        return _orthogonalized(x_nrc, steps)
    return jax.lax.map(lambda x_rc: _orthogonalized(x_rc[None], steps)[0], x_nrc, batch_size=at_once)


def _orthogonalized(x_nrc: jax.Array, steps: int) -> jax.Array:
    a, b, c = COEFFICIENTS
    exact_nrc = x_nrc.astype(jnp.float32)
    norm_n11 = jnp.sqrt(jnp.square(exact_nrc).sum(axis=(1, 2), keepdims=True))
    x_nrc = (exact_nrc / (norm_n11 + _EPS)).astype(x_nrc.dtype)
    for _ in range(steps):
        gram_nrr = _product("nrc,nsc->nrs", x_nrc, x_nrc)
        both_nrr = b * gram_nrr + c * _product("nrs,nst->nrt", gram_nrr, gram_nrr)
        x_nrc = a * x_nrc + _product("nrs,nsc->nrc", both_nrr, x_nrc)
    return x_nrc


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a product whose sums are float32, as an array of the type of its operands."""
    precision = "highest" if x.dtype == jnp.float32 else None  # else float32 means fewer bits on TPUs
    return jnp.einsum(dims, x, y, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)


FACTS = OptimizerFacts(
    listed=1,
    settings=("beta1", "beta2", "eps", "momentum", "newton_schulz_steps", "newton_schulz_dtype", "moments_dtype"),
    hidden_matrix_moments=1,
    orthogonalizes=True,
)
_RMS = 0.2


class MomentumState(NamedTuple):
    """The momentum of each matrix."""

    mu: optax.Updates


def scale(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    """Return Muon for matrices between hidden layers, and AdamW for the rest."""
    is_own = jax.tree.map(lambda parameter: parameter.is_hidden_matrix, parameters)
    both = optax.chain(
        optax.masked(_muon(optimizer, parameters, platform), is_own),
        optax.masked(adamw.scale(optimizer, parameters, platform), jax.tree.map(lambda own: not own, is_own)),
    )
    own = [number for number, is_one in enumerate(jax.tree.leaves(is_own)) if is_one]

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **rest: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = both.update(grads, state, params, **rest)
        return all_after(jax.tree.leaves(updates)[own[-1]], updates, platform) if own else updates, state

    return optax.GradientTransformationExtraArgs(both.init, update)


def _muon(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    beta = optimizer.momentum

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: optax.Updates,
        state: MomentumState,
        params: optax.Params | None = None,
        *,
        is_good: jax.Array,
        **_: Any,
    ) -> tuple[optax.Updates, MomentumState]:
        moved = jax.tree.map(lambda g, m: beta * m + g, grads, state.mu)
        mu = unless_bad(is_good, moved, state.mu)
        nesterov, structure = jax.tree.flatten(jax.tree.map(lambda g, m: beta * m + g, grads, mu))
        own = [each for each in jax.tree.leaves(parameters) if each.is_hidden_matrix]
        updates: list[jax.Array] = []
        for x, parameter in zip(nesterov, own, strict=True):
            if updates and platform == "cpu":  # where all devices must come to collectives in one order
                x = depend_on(x, updates[-1], platform)
            updates.append(_orthogonal_update(x, parameter, optimizer, platform))
        return jax.tree.unflatten(structure, updates), MomentumState(mu)

    return optax.GradientTransformationExtraArgs(init, update)


def _orthogonal_update(x: jax.Array, parameter: Parameter, optimizer: OptimizerConfig, platform: str) -> jax.Array:
    """Return this device's shard of the orthogonalized matrices, of whose momentum `x` is the shard.

    Matrices are exchanged in the type of the products' operands.
    """
    matrix = parameter.matrix
    assert matrix is not None, "a parameter with matrices"

    def of_whole(x: jax.Array) -> jax.Array:
        rows, columns = matrix.shape((1,) * matrix.stacked + x.shape[1:])
        unit_nrc = orthogonalized(x.reshape(-1, rows, columns), optimizer.newton_schulz_steps)
        return (_RMS * math.sqrt(max(rows, columns)) * unit_nrc).reshape(x.shape)

    x = x.astype(optimizer.products_dtype(platform))
    return on_whole_matrices(of_whole, x, parameter.spec, matrix.stacked).astype(jnp.float32)
