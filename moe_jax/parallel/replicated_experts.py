"""Experts with copies on several ranks: all copies are updated with the sum of their gradients, inside `shard_map`.

P expert ranks, S positions in total, L = S/P on each rank; E experts, where the number E marks a free position; R rows
of a stack of blocks on this pipeline stage.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.parallel.expert_transfer import Leaves, read_expert, write_expert
from moe_jax.parallel.mesh import Axes
from moe_jax.parallel.ordering import depend_on_all


def all_reduce_replicated_experts(
    leaves: Leaves, expert_RS: Int[Array, "R S"], experts: int, axis: Axes, platform: str, others: Leaves
) -> Leaves:
    """Return gradients [R, L, …] of stacked experts, summed over the copies of each expert, with the same bits in each
    copy.

    Replicated experts are summed one after another, so nothing is sent if no expert has copies. A rank has at most one
    copy of an expert. On CPU the loop waits for `others`, whose sums would run concurrently with its own: see
    `measure/races.py`.
    """
    rows, slots = expert_RS.shape
    local_slots = slots // jax.lax.axis_size(axis)
    own_RL = jax.lax.dynamic_slice_in_dim(expert_RS, jax.lax.axis_index(axis) * local_slots, local_slots, axis=1)
    copies_RE = jnp.sum(expert_RS[:, :, None] == jnp.arange(experts), axis=1)
    has_copies_RE = copies_RE > 1
    most = rows * min(slots - experts, experts)  # each of them occupies at least one position more than one
    row_G, expert_G = jnp.nonzero(has_copies_RE, size=most)

    def sum_one(number: jax.Array, leaves: Leaves) -> Leaves:
        row = row_G[number]
        is_it_L = own_RL[row] == expert_G[number]
        slot, is_here = jnp.argmax(is_it_L), is_it_L.any()
        own = read_expert(leaves, row, slot)
        total = jax.lax.psum(jnp.where(is_here, own, 0), axis)
        return write_expert(leaves, row, slot, jnp.where(is_here, total, own))

    with jax.named_scope("sum_copies"):
        count = jnp.sum(has_copies_RE)
        return jax.lax.fori_loop(
            0, depend_on_all(count, others, platform) if platform == "cpu" else count, sum_one, leaves
        )
