"""One collective-permute per distance: asynchronous on TPU and GPU."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.mesh import Axis


def start(x: Shaped[Array, "P ..."], axis: Axis, platform: str) -> tuple[jax.Array, ...]:
    """Send block p to rank p of `axis`: P - 1 hops, of which hop s carries one block to the rank s further on.

    Returns `x`, then the block that arrives with each hop.
    """
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    under_way = [x]
    for hop in range(1, ranks):
        sent = jax.lax.dynamic_index_in_dim(x, (rank + hop) % ranks)
        to_rank = [(source, (source + hop) % ranks) for source in range(ranks)]
        under_way.append(jax.lax.ppermute(sent, axis, to_rank))
    return tuple(under_way)


def finish(under_way: tuple[jax.Array, ...], axis: Axis, platform: str) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    received, *blocks = under_way
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    for hop, block in enumerate(blocks, start=1):
        received = jax.lax.dynamic_update_index_in_dim(received, block, (rank - hop) % ranks, axis=0)
    return received
