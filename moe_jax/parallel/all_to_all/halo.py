"""HALO: rows for the own node travel concurrently with the rows for all other nodes (Piper, section V, algorithm 1).

Rows for other nodes travel first between members with equal numbers in their nodes, then inside the target node. N
nodes of L ranks, P = N · L.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=4, by_node=True, permutes=True, counted_as="halo")


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p.

    Returns the rows from this node and the rows from all other nodes, the latter in the order of nodes.
    """
    nodes, local = ranks.nodes(), ranks.per_node
    blocks = x.reshape(nodes, local, *x.shape[1:])  # [to node, to member]
    with jax.named_scope("own"):  # phase 1
        own = jax.lax.dynamic_index_in_dim(blocks, _node(ranks))
        # XLA:TPU finishes one all-to-all before it starts the next, but overlaps permutes with an all-to-all
        own = _permute_inside(own, ranks) if ranks.platform == "tpu" else _exchange_inside(own, ranks)
    if nodes == 1:
        return (own,)
    with jax.named_scope("between"):  # phase 2 → [from node, to member]; rows for the own node stay on their rank
        blocks = jax.lax.all_to_all(blocks, ranks.axis, 0, 0, tiled=True, axis_index_groups=ranks.groups_between())
    others = jnp.where(_indices(nodes - 1, x) < _node(ranks), blocks[:-1], blocks[1:])
    # Phases 1 and 3 use the same links, so phase 1 should overlap with phase 2. XLA:GPU alone overlaps it with neither.
    own, others = jax.lax.optimization_barrier((own, others))
    with jax.named_scope("onward"):  # phase 3
        return own, _exchange_inside(others, ranks)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Assemble the result. Its block p came from rank p."""
    own, *rest = under_way
    if not rest:
        return own[0]
    (others,) = rest
    number, node = _indices(ranks.nodes(), own[0]), _node(ranks)
    before, after = jnp.concatenate([others, own]), jnp.concatenate([own, others])
    blocks = jnp.where(number < node, before, jnp.where(number > node, after, own))
    return blocks.reshape(ranks.size(), *blocks.shape[2:])


def _exchange_inside(blocks: Shaped[Array, "n L ..."], ranks: Ranks) -> Shaped[Array, "n L ..."]:
    """Exchange inside each node: [from node, to member] → [from node, from member]."""
    if ranks.per_node == 1:
        return blocks
    return jax.lax.all_to_all(blocks, ranks.axis, 1, 1, tiled=True, axis_index_groups=ranks.groups_inside())


def _permute_inside(own: Shaped[Array, "1 L ..."], ranks: Ranks) -> Shaped[Array, "1 L ..."]:
    """Do the same as `_exchange_inside`, with one permute per distance."""
    local = ranks.per_node
    member = jax.lax.axis_index(ranks.axis) % local
    received = own
    for distance in range(1, local):
        sent = jax.lax.dynamic_index_in_dim(own, (member + distance) % local, axis=1)
        block = permuted(sent, ranks.axis, ranks.shifts_inside(distance))
        received = jax.lax.dynamic_update_slice_in_dim(received, block, (member - distance) % local, axis=1)
    return received


def _node(ranks: Ranks) -> jax.Array:
    return jax.lax.axis_index(ranks.axis) // ranks.per_node


def _indices(count: int, x: Shaped[Array, "L ..."]) -> jax.Array:
    """Return 0 … count - 1 along a new dimension in front of the dimensions of x."""
    return jnp.arange(count).reshape(count, *(1 for _ in x.shape))
