"""One collective-permute per distance: asynchronous on every platform."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ordering import apart, hold


def start(x: Shaped[Array, "P ..."], axis: Axis, platform: str) -> tuple[jax.Array, ...]:
    """Send block p to rank p of `axis`: P - 1 hops, of which hop s carries one block to the rank s further on.

    Returns `x`, then for each hop the block that is sent and the one that arrives.
    """
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    under_way = [x]
    for hop in range(1, ranks):
        sent = apart(jax.lax.dynamic_index_in_dim(x, (rank + hop) % ranks), platform)
        to_rank = [(source, (source + hop) % ranks) for source in range(ranks)]
        under_way += [sent, jax.lax.ppermute(sent, axis, to_rank)]
    return tuple(under_way)


def finish(under_way: tuple[jax.Array, ...], axis: Axis, platform: str) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    received, *hops = under_way
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    for hop in range(1, ranks):
        sent, block = hops[2 * hop - 2 : 2 * hop]
        block = hold(block, sent, platform) if sent.size else block
        received = jax.lax.dynamic_update_index_in_dim(received, block, (rank - hop) % ranks, axis=0)
    return received
