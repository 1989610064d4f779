"""The hierarchical all-to-all of HetuMoE (Nie et al. 2022): all rows pass through one leader of each node.

It sends the fewest messages between nodes, which suits nodes whose ranks share one slow network adapter. N nodes of L
ranks, P = N · L; the first rank of a node is its leader. All ranks run the same program, so each allocates the buffers
of a leader, L times the size of its own rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=2, by_node=True, permutes=True, counted_as="hier_1d")

_LEADER = 0


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p: members send to their leader, leaders to each other, and leaders to their members."""
    nodes, local = ranks.nodes(), ranks.per_node
    members = range(1, local)
    rows = x.reshape(nodes, local, *x.shape[1:])  # [to node, to member]
    with jax.named_scope("gather"):
        gathered = [permuted(rows, ranks.axis, ranks.inside(m, _LEADER)) for m in members]
    # valid on leaders only, as everything below: [to node, from member, to member]
    blocks = jnp.stack([rows, *gathered], axis=1)
    with jax.named_scope("between"):
        blocks = _between_leaders(blocks, ranks)
    with jax.named_scope("scatter"):  # [from node, from member]
        scattered = [permuted(blocks[:, :, m], ranks.axis, ranks.inside(_LEADER, m)) for m in members]
    member = jax.lax.axis_index(ranks.axis) % local
    return (jax.lax.select_n(member, blocks[:, :, _LEADER], *scattered),)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Return the result. Its block p came from rank p."""
    (rows,) = under_way
    return rows.reshape(ranks.size(), *rows.shape[2:])


def _between_leaders(blocks: Shaped[Array, "N ..."], ranks: Ranks) -> Shaped[Array, "N ..."]:
    """Exchange between leaders: block n goes to the leader of node n. On members the result is arbitrary."""
    nodes, node = ranks.nodes(), jax.lax.axis_index(ranks.axis) // ranks.per_node
    received = blocks
    for distance in range(1, nodes):
        sent = jax.lax.dynamic_index_in_dim(blocks, (node + distance) % nodes)
        arrived = permuted(sent, ranks.axis, ranks.between(distance, _LEADER))
        received = jax.lax.dynamic_update_index_in_dim(received, arrived, (node - distance) % nodes, axis=0)
    return received
