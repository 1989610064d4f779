"""Collective-permutes between nodes, one for each distance: no row of a rank's own node is in them.

N nodes.
"""

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.ranks import Ranks


def between_nodes(blocks: Shaped[Array, "N ..."], ranks: Ranks, members: range) -> list[jax.Array]:
    """Send block n to the same member of node n, for these members of each node.

    Returns what came from each distance, 1 … N - 1 nodes before this one; at other members zeros.
    """
    nodes, node = ranks.nodes(), _node(ranks)
    return [
        jax.lax.ppermute(
            jax.lax.dynamic_index_in_dim(blocks, (node + distance) % nodes, keepdims=False),
            ranks.axis,
            ranks.between(distance, members),
        )
        for distance in range(1, nodes)
    ]


def by_node(
    blocks: Shaped[Array, "N ..."], own: jax.Array | None, arrived: list[jax.Array], ranks: Ranks
) -> Shaped[Array, "N ..."]:
    """`blocks` with what came from each distance in the place of its node; `own` (None: unchanged) in this one's."""
    nodes, node = ranks.nodes(), _node(ranks)
    for distance, block in enumerate([own, *arrived]):
        if block is not None:
            blocks = jax.lax.dynamic_update_index_in_dim(blocks, block, (node - distance) % nodes, axis=0)
    return blocks


def _node(ranks: Ranks) -> jax.Array:
    return jax.lax.axis_index(ranks.axis) // ranks.per_node
