"""Dispatch, experts and combine of a ring, hop by hop: what one hop brought is computed while the next one travels.

P expert ranks, t tensor ranks. In hop s rank r sends block r + s, whose experts' results come back the same way; blocks
that stay (s = 0) need no link, so their experts fill the time of the first hop.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import MoE
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.hooks import hooks_of
from moe_jax.models.moe import run_experts, sent_by
from moe_jax.parallel.all_to_all.ring import shift
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.tensor_axis import gathered, summed


def through_experts(params: Any, sent: Any, ranks: Ranks, moe: MoE, product: GroupedProduct) -> jax.Array:
    """What the experts made of all rows [P, …], back in their place."""
    count, rank = ranks.size(), jax.lax.axis_index(ranks.axis)
    received = []
    for distance in range(count):
        block = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=(rank + distance) % count), sent)
        received.append(_hop(block, "dispatch", distance, ranks, moe))
    returned: jax.Array | None = None
    for distance, block in enumerate(received):
        out = run_experts(params, jax.tree.map(lambda x: gathered(x, 0), block), moe, product)
        back = _hop(summed(out, 0), "combine", -distance, ranks, moe)
        if returned is None:
            returned = jax.lax.empty((count, *back.shape[1:]), back.dtype)
        returned = jax.lax.dynamic_update_index_in_dim(returned, back, (rank + distance) % count, axis=0)
    assert returned is not None
    return returned


def _hop(block: Any, name: str, distance: int, ranks: Ranks, moe: MoE) -> Any:
    """One hop of an exchange, of every array of a tree [1, …]; hooks see rows that stay, too."""
    hooks = hooks_of(moe)
    there, back = (partial(shift, distance=places, ranks=ranks) for places in (distance, -distance))
    around, backward = hooks.around(name, backward=False), hooks.around(name, backward=True)

    def sent(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return there(x)
        return sent_by(there, back, around, backward, x)

    with jax.named_scope(name):
        return jax.tree.map(sent, block)
