"""One collective-permute per distance. They are asynchronous on TPU and GPU."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=1, permutes=True, counted_as="ring")


def shift(x: Shaped[Array, "..."], distance: int, ranks: Ranks) -> Shaped[Array, "..."]:
    """Return the `x` of the rank `distance` before this one."""
    count = ranks.size()
    if distance % count == 0:
        return x
    return permuted(x, ranks.axis, [(source, (source + distance) % count) for source in range(count)])


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p in P - 1 hops. Hop s carries one block to the rank s after this one.

    Returns `x`, then the block that arrives with each hop.
    """
    count, rank = ranks.size(), jax.lax.axis_index(ranks.axis)
    under_way = [x]
    for hop in range(1, count):
        sent = jax.lax.dynamic_index_in_dim(x, (rank + hop) % count)
        under_way.append(shift(sent, hop, ranks))
    return tuple(under_way)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Assemble the result. Its block p came from rank p."""
    received, *blocks = under_way
    count, rank = ranks.size(), jax.lax.axis_index(ranks.axis)
    for hop, block in enumerate(blocks, start=1):
        received = jax.lax.dynamic_update_index_in_dim(received, block, (rank - hop) % count, axis=0)
    return received
