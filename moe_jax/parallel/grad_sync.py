"""Sums over devices that autodiff does not insert: gradients, their norm, and counts."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ShardSpec


def sync_gradients(grads: Tree, specs: Tree, shard_specs: Tree, platform: str) -> Tree:
    """Sum each gradient over the token and pipeline axes on which its parameter is replicated.

    `shard_specs` holds a `ShardSpec` for each parameter: a gradient that is sharded over some of these axes is
    reduce-scattered, so that a device gets only the sum of its own shard.

    A device's gradient covers its own tokens. The parameters of an expert are on one expert rank, whose gradient
    already covers the tokens of every rank that sent it some, so they are summed over the data axis, and over the
    context axis unless it shards experts. The heads and hidden widths of a tensor rank have processed the tokens of all
    tensor ranks. Parameters outside of the blocks are used by one or two pipeline stages; the gradient of the other
    stages is 0.
    """

    def sync(grad: jax.Array, spec: jax.sharding.PartitionSpec, shard_spec: ShardSpec) -> jax.Array:
        sharded = sharded_axes(spec) | {*shard_spec.axes}
        axes = tuple(axis for axis in (*TOKEN_AXES, Axis.PIPELINE) if axis not in sharded)
        with jax.named_scope("grad_reduce"):
            own = shard_spec.reduce_scatter(grad, platform)
            return jax.lax.psum(own, axes) if axes else own

    return jax.tree.map(sync, grads, specs, shard_specs)


class Experts(NamedTuple):
    """Which expert each gradient of a stacked leaf [R, L, …] belongs to."""

    number_RL: Int[Array, "R L"]
    total: int  # experts of all ranks


def global_norm(
    grads: Tree, specs: Tree, platform: str, experts: Iterable[Experts | None] = itertools.repeat(None)
) -> Float[Array, ""]:
    """Return the L2 norm of synchronised gradients. Each parameter counts once, however it or its gradient is sharded.

    Squares of the gradients of experts (`experts`: one entry per leaf, None for leaves without experts) are added in
    the order of experts, so that the norm does not depend on which rank has which expert. On CPU the remaining sum over
    devices waits for all gradients, because it would block the thread that computes them.
    """
    squares: dict[tuple[str, ...], dict[tuple[int, ...], jax.Array]] = {}
    for grad, spec, leaf_experts in zip(jax.tree.leaves(grads), jax.tree.leaves(specs), experts, strict=False):
        axes = tuple(axis for axis in sorted(sharded_axes(spec)) if jax.lax.axis_size(axis) > 1)
        square = _square(grad.astype(jnp.float32), leaf_experts)
        same = squares.setdefault(axes, {})
        same[square.shape] = same[square.shape] + square if square.shape in same else square
    some = sum((part.ravel()[0] for same in squares.values() for part in same.values()), start=jnp.float32(0))
    total = sum(map(jnp.sum, squares.pop((), {}).values()), start=jnp.float32(0))
    with jax.named_scope("grad_norm"):
        for axes, parts in squares.items():
            own = jnp.concatenate([part.ravel() for part in parts.values()])
            total += jax.lax.psum(depend_on(own, some + total, platform) if platform == "cpu" else own, axes).sum()
    return jnp.sqrt(total)


def _square(grad: jax.Array, experts: Experts | None) -> jax.Array:
    """Return the sum of squares of all numbers, or of the numbers of each expert [R, E], with 0 for those of other
    ranks.
    """
    if experts is None:
        return jnp.sum(jnp.square(grad))
    square_RL = jnp.sum(jnp.square(grad), axis=tuple(range(2, grad.ndim)))
    rows = len(square_RL)
    zeros_RE = jnp.zeros((rows, experts.total), jnp.float32)
    return zeros_RE.at[jnp.arange(rows)[:, None], experts.number_RL].set(square_RL, unique_indices=True)


def sum_over_batch(tree: Tree) -> Tree:
    """Sum every leaf over the devices that have different tokens, with one collective per dtype.

    Not differentiable.
    """
    leaves, structure = jax.tree.flatten(tree)
    sums: dict[int, jax.Array] = {}
    with jax.named_scope("sum_over_batch"):
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            same = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            total = jax.lax.psum(jnp.concatenate([leaves[i].ravel() for i in same]), TOKEN_AXES)
            ends = list(itertools.accumulate(leaves[i].size for i in same))
            parts = jnp.split(total, ends[:-1])
            sums |= {i: part.reshape(leaves[i].shape) for i, part in zip(same, parts, strict=True)}
    return jax.tree.unflatten(structure, [sums[i] for i in range(len(leaves))])
