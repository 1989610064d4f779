"""The two-dimensional hierarchical all-to-all of Tutel (Hwang et al. 2023): first inside nodes, then between nodes.

The second step exchanges between members with equal numbers in their nodes, so few large messages leave a node. N nodes
of L ranks, P = N · L.
"""

import jax
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=3, by_node=True, counted_as="hier_2d")


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p, through the member of this node that has the same number in its node as rank p."""
    nodes = ranks.nodes()
    blocks = x.reshape(nodes, ranks.per_node, *x.shape[1:])  # [to node, to member]
    if ranks.per_node > 1:
        with jax.named_scope("inside"):  # → [to node, from member]
            blocks = jax.lax.all_to_all(blocks, ranks.axis, 1, 1, tiled=True, axis_index_groups=ranks.groups_inside())
    if nodes > 1:
        with jax.named_scope("between"):  # → [from node, from member]
            blocks = jax.lax.all_to_all(blocks, ranks.axis, 0, 0, tiled=True, axis_index_groups=ranks.groups_between())
    return (blocks,)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Return the result. Its block p came from rank p."""
    (blocks,) = under_way
    return blocks.reshape(ranks.size(), *blocks.shape[2:])
