"""One collective-permute per distance: asynchronous on every platform, and each block can be used when it comes."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.mesh import Axis


def exchange(x: Shaped[Array, "P ..."], axis: Axis) -> Shaped[Array, "P ..."]:
    """Send block p to rank p of `axis`; block p of the result came from rank p. Its own inverse.

    P - 1 hops: hop s carries one block to the rank s further on.
    """
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    received = x
    for hop in range(1, ranks):
        block = jax.lax.dynamic_index_in_dim(x, (rank + hop) % ranks)
        block = jax.lax.ppermute(block, axis, [(source, (source + hop) % ranks) for source in range(ranks)])
        received = jax.lax.dynamic_update_index_in_dim(received, block, (rank - hop) % ranks, axis=0)
    return received
