"""Collective-permutes around a ring, asynchronous on every platform (Patarasuk and Yuan 2009).

P ranks, m = n / P numbers for each, rounded up.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.config.facts import ReductionFacts
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.permute import permuted

FACTS = ReductionFacts(listed=2)


def reduce(x_n: Num[Array, " n"], axes: tuple[Axis, ...]) -> Num[Array, " n"]:
    """Return the sum of `x_n` over all ranks of `axes`, on each of them.

    P - 1 hops sum each chunk on its way around the ring; P - 1 more bring the sums to all ranks. A hop carries n / P
    numbers.
    """
    ranks, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    sum_m = scatter(jnp.pad(x_n, (0, -len(x_n) % ranks)).reshape(ranks, -1), axes)
    total_Pm = jnp.zeros((ranks, len(sum_m)), sum_m.dtype)
    for hop in range(ranks):
        if hop:
            sum_m = _to_next(sum_m, axes)
        total_Pm = jax.lax.dynamic_update_index_in_dim(total_Pm, sum_m, (rank - hop) % ranks, axis=0)
    return total_Pm.reshape(-1)[: len(x_n)]


def scatter(x_Pm: Num[Array, "P m"], axes: tuple[Axis, ...]) -> Num[Array, " m"]:
    """Return row r of the sum of `x_Pm` over all ranks of `axes`, on rank r."""
    ranks, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)

    def own_m(hop: int) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x_Pm, (rank - 1 - hop) % ranks, keepdims=False)

    sum_m = own_m(0)
    for hop in range(1, ranks):
        sum_m = _to_next(sum_m, axes) + own_m(hop)
    return sum_m


def _to_next(x_m: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    ranks = jax.lax.axis_size(axes)
    return permuted(x_m, axes, [(source, (source + 1) % ranks) for source in range(ranks)])
