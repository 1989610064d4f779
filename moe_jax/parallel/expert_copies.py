"""Copies of a few experts on all expert ranks, for one block of one step, inside `shard_map`.

K copies; P expert ranks with L positions each, S = P · L positions in total, where S marks a copy that is not used.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.parallel.mesh import Axes

_Tree = TypeVar("_Tree")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def copied_experts(params: _Tree, position_K: Int[Array, " K"], axis: Axes, dtype: str) -> _Tree:
    """Return the experts at these positions on all ranks: leaves [L, …] → [K, …], cast to `dtype`; 0 if not used.

    One all-reduce of each leaf, to which all ranks but the owner add 0, so the copies are exact. In the backward pass
    the gradients of the copies are summed in float32, and their owners add them to their own, in the type of `params`:
    with ZeRO 3 sums are rounded to the compute type here. Scheduled steps add them in float32.
    """
    with jax.named_scope("copy_hot_experts"):
        return jax.lax.psum(parts_of_copies(params, position_K, axis, dtype), axis)


def parts_of_copies(params: _Tree, position_K: Int[Array, " K"], axis: Axes, dtype: str) -> _Tree:
    """Return what this rank adds to the copies: its own experts, cast to `dtype`, and 0 for others."""
    own_K = _own_index(position_K, len(jax.tree.leaves(params)[0]), axis)
    # no index is negative
    own = jax.tree.map(lambda x: x.at[own_K].get(mode="fill", fill_value=0, wrap_negative_indices=False), params)
    return jax.tree.map(lambda x: x.astype(dtype), own)


def add_to_owners(grads: _Tree, summed: _Tree, position_K: Int[Array, " K"], axis: Axes) -> _Tree:
    """Return the gradients of this rank's experts [L, …] with those of all copies of them, of which `summed` [K, …] is
    the sum over ranks.
    """
    own_K = _own_index(position_K, len(jax.tree.leaves(grads)[0]), axis)
    return jax.tree.map(
        lambda x, d: x.at[own_K].add(d.astype(x.dtype), mode="drop", wrap_negative_indices=False), grads, summed
    )


def _own_index(position_K: Int[Array, " K"], local: int, axis: Axes) -> Int[Array, " K"]:
    """Return the place of each expert among this rank's `local` ones; L: it is not here."""
    place_K = position_K - jax.lax.axis_index(axis) * local
    return jnp.where((place_K >= 0) & (place_K < local), place_K, local)


def _forward(
    params: _Tree, position_K: Int[Array, " K"], axis: Axes, dtype: str
) -> tuple[_Tree, tuple[_Tree, Int[Array, " K"]]]:
    return copied_experts(params, position_K, axis, dtype), (params, position_K)


def _backward(axis: Axes, dtype: str, saved: tuple[_Tree, Int[Array, " K"]], grads: _Tree) -> tuple[_Tree, None]:
    params, position_K = saved
    with jax.named_scope("sum_hot_experts"):
        summed = jax.lax.psum(jax.tree.map(lambda d: d.astype(jnp.float32), grads), axis)
    return add_to_owners(jax.tree.map(jnp.zeros_like, params), summed, position_K, axis), None


copied_experts.defvjp(_forward, _backward)
