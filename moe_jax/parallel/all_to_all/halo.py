"""Rows of the own node beside all others, which travel between equal members of nodes and then inside their node.

HALO (Piper, section V, algorithm 1). N nodes of L ranks, P = N · L.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.parallel.all_to_all.hops import between_nodes, by_node
from moe_jax.parallel.ranks import Ranks


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p. Returns `x`, the rows from this node, and the rows from all others, nearest first.

    Phase 1 needs nothing of phases 2 and 3, so that the links inside a node work beside those between nodes.
    """
    nodes, local = ranks.nodes(), ranks.per_node
    blocks = x.reshape(nodes, local, *x.shape[1:])  # [to node, to member]
    with jax.named_scope("between"):  # phase 2
        arrived = between_nodes(blocks, ranks, members=range(local))
    node = jax.lax.axis_index(ranks.axis) // local
    with jax.named_scope("own"):  # phase 1
        own = _inside(jax.lax.dynamic_index_in_dim(blocks, node), ranks)
    if not arrived:
        return x, own
    with jax.named_scope("onward"):  # phase 3
        return x, own, _inside(jnp.stack(arrived), ranks)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    x, own, *others = under_way
    blocks = x.reshape(ranks.nodes(), ranks.per_node, *x.shape[1:])  # all of it is overwritten
    arrived = list(others[0]) if others else []
    return by_node(blocks, own[0], arrived, ranks).reshape(x.shape)


def _inside(blocks: Shaped[Array, "n L ..."], ranks: Ranks) -> Shaped[Array, "n L ..."]:
    """[from node, to member] → [from node, from member]"""
    if ranks.per_node == 1:
        return blocks
    return jax.lax.all_to_all(blocks, ranks.axis, 1, 1, tiled=True, axis_index_groups=ranks.groups_inside())
