"""Rows of the own node beside all others, which travel between equal members of nodes and then inside their node.

HALO (Piper, section V, algorithm 1). N nodes of L ranks, P = N · L.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=4, by_node=True, permutes=True, counted_as="halo")


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p. Returns the rows from this node, and those from all others in the order of nodes."""
    nodes, local = ranks.nodes(), ranks.per_node
    blocks = x.reshape(nodes, local, *x.shape[1:])  # [to node, to member]
    with jax.named_scope("own"):  # phase 1
        own = jax.lax.dynamic_index_in_dim(blocks, _node(ranks))
        # XLA:TPU ends one all-to-all before it starts the next, but runs permutes beside it
        own = _hop_by_hop(own, ranks) if ranks.platform == "tpu" else _inside(own, ranks)
    if nodes == 1:
        return (own,)
    with jax.named_scope("between"):  # phase 2 → [from node, to member]; the own node's rows stay at their rank
        blocks = jax.lax.all_to_all(blocks, ranks.axis, 0, 0, tiled=True, axis_index_groups=ranks.groups_between())
    others = jnp.where(_numbers(nodes - 1, x) < _node(ranks), blocks[:-1], blocks[1:])
    # Phases 1 and 3 use the same links, so the former belongs beside phase 2. By itself XLA:GPU puts it beside neither.
    own, others = jax.lax.optimization_barrier((own, others))
    with jax.named_scope("onward"):  # phase 3
        return own, _inside(others, ranks)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    own, *rest = under_way
    if not rest:
        return own[0]
    (others,) = rest
    number, node = _numbers(ranks.nodes(), own[0]), _node(ranks)
    before, behind = jnp.concatenate([others, own]), jnp.concatenate([own, others])
    blocks = jnp.where(number < node, before, jnp.where(number > node, behind, own))
    return blocks.reshape(ranks.size(), *blocks.shape[2:])


def _inside(blocks: Shaped[Array, "n L ..."], ranks: Ranks) -> Shaped[Array, "n L ..."]:
    """[from node, to member] → [from node, from member]"""
    if ranks.per_node == 1:
        return blocks
    return jax.lax.all_to_all(blocks, ranks.axis, 1, 1, tiled=True, axis_index_groups=ranks.groups_inside())


def _hop_by_hop(own: Shaped[Array, "1 L ..."], ranks: Ranks) -> Shaped[Array, "1 L ..."]:
    """As `_inside`, one permute for each distance."""
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


def _numbers(count: int, x: Shaped[Array, "L ..."]) -> jax.Array:
    """0 … count - 1 in front of the dimensions of x."""
    return jnp.arange(count).reshape(count, *(1 for _ in x.shape))
