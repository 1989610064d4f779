"""Sums over devices that differentiation leaves to us: gradients, their norm, and counts."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.ordering import after
from moe_jax.parallel.sharding import sharded_axes
from moe_jax.parallel.zero import Cut


def sync_gradients(grads: Any, specs: Any, cuts: Any, platform: str) -> Any:
    """Sum each gradient over the axes that cut tokens or blocks and that its parameter is replicated on.

    Of what is cut over some of them, a device gets the sum of its own part.

    A device's gradient covers its own tokens. An expert's parameters live on one expert rank, whose gradient
    already covers the tokens of every rank that sent it some: they are summed over the data axis only. Heads and
    hidden widths of a tensor rank have seen the tokens of all tensor ranks. What lies outside of all blocks is used by
    one pipeline stage, or two, and the others' gradient is 0.
    """

    def sync(grad: jax.Array, spec: jax.sharding.PartitionSpec, cut: Cut) -> jax.Array:
        taken = sharded_axes(spec) | {*cut.axes}
        axes = tuple(axis for axis in (*TOKEN_AXES, Axis.PIPELINE) if axis not in taken)
        with jax.named_scope("grad_reduce"):
            own = cut.summed(grad, platform)
            return jax.lax.psum(own, axes) if axes else own

    return jax.tree.map(sync, grads, specs, cuts)


def global_norm(grads: Any, specs: Any, platform: str) -> Float[Array, ""]:
    """The L2 norm of synchronised gradients, each parameter counted once however it, or its gradient, is cut.

    On CPU what is left to sum over devices waits for all gradients: it would keep the thread that computes.
    """
    squares: dict[tuple[str, ...], jax.Array] = {}
    for grad, spec in zip(jax.tree.leaves(grads), jax.tree.leaves(specs), strict=True):
        axes = tuple(axis for axis in sorted(sharded_axes(spec)) if jax.lax.axis_size(axis) > 1)
        squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.sum(jnp.square(grad.astype(jnp.float32)))
    total = squares.pop((), jnp.float32(0))
    with jax.named_scope("grad_norm"):
        for axes, square in squares.items():
            total += jax.lax.psum(after(square, total, platform) if platform == "cpu" else square, axes)
    return jnp.sqrt(total)


def sum_over_batch(tree: Any) -> Any:
    """Sum every leaf over the devices that hold different tokens, in one collective for each type of number.

    Not to be differentiated.
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
