"""Collective-permutes around a ring, asynchronous on every platform (Patarasuk and Yuan 2009).

P ranks, m = n / P numbers of each, rounded up.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.mesh import Axis


def reduce(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> Num[Array, " n"]:
    """The sum of `x_n` over all ranks of `axes`, on each of them.

    P - 1 hops sum each chunk on its way around; P - 1 more bring the sums to all. A hop carries n / P numbers.
    """
    ranks, rank = math.prod(jax.lax.axis_size(axis) for axis in axes), jax.lax.axis_index(axes)
    to_next = [(source, (source + 1) % ranks) for source in range(ranks)]
    chunks_Pm = jnp.pad(x_n, (0, -len(x_n) % ranks)).reshape(ranks, -1)

    sum_1m = jax.lax.dynamic_index_in_dim(chunks_Pm, rank)
    for hop in range(1, ranks):
        own_1m = jax.lax.dynamic_index_in_dim(chunks_Pm, (rank - hop) % ranks)
        sum_1m = jax.lax.ppermute(sum_1m, axes, to_next) + own_1m

    total_Pm = jnp.zeros_like(chunks_Pm)
    for hop in range(ranks):
        if hop:
            sum_1m = jax.lax.ppermute(sum_1m, axes, to_next)
        total_Pm = jax.lax.dynamic_update_index_in_dim(total_Pm, sum_1m, (rank + 1 - hop) % ranks, axis=0)
    return total_Pm.reshape(-1)[: len(x_n)]
