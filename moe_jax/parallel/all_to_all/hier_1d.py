"""Through one leader of each node: the fewest messages between nodes, for nodes whose ranks share one slow adapter.

The hierarchical all-to-all of HetuMoE (Nie et al. 2022, section 3.2). N nodes of L ranks, P = N · L; a node's first
rank leads. All ranks make room for what a leader holds, L times their own rows, as they run the same program.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe_jax.parallel.all_to_all.hops import between_nodes, by_node
from moe_jax.parallel.ranks import Ranks

_LEADER = 0


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p: members' rows to their leader, leaders' to each other, and out to the members."""
    nodes, local = ranks.nodes(), ranks.per_node
    members = range(1, local)
    rows = x.reshape(nodes, local, *x.shape[1:])  # [to node, to member]
    with jax.named_scope("gather"):
        gathered = [jax.lax.ppermute(rows, ranks.axis, ranks.inside(m, _LEADER)) for m in members]
    blocks = jnp.stack([rows, *gathered], axis=1)  # at leaders, as all below: [to node, from member, to member]
    with jax.named_scope("between"):
        blocks = by_node(blocks, None, between_nodes(blocks, ranks, members=range(1)), ranks)
    with jax.named_scope("scatter"):  # [from node, from member]
        scattered = [jax.lax.ppermute(blocks[:, :, m], ranks.axis, ranks.inside(_LEADER, m)) for m in members]
    member = jax.lax.axis_index(ranks.axis) % local
    return (jax.lax.select_n(member, blocks[:, :, _LEADER], *scattered),)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    (rows,) = under_way
    return rows.reshape(ranks.size(), *rows.shape[2:])
