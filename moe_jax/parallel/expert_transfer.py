"""Transfer of experts between ranks, and sums of the gradients of their copies, inside `shard_map`.

The parameters travel from device to device. Experts may have copies on several ranks, which are all updated with the
sum of their gradients.

P expert ranks, L positions of each, S = P · L positions in total in sums of copies; E experts, where the number E marks
a free position; R rows of a stack of blocks on this pipeline stage; in transfers S stages, at most n rounds.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.parallel.mesh import Axes, Axis
from moe_jax.parallel.ordering import depend_on_all
from moe_jax.parallel.permute import permuted

Leaves = list[jax.Array]  # [R, L, …]
Index = jax.Array | np.ndarray


class PhysicalSlot(NamedTuple):
    """The expert that each rank sends in one direction, and whether another expert replaces it.

    If a rank has none to send, the position is arbitrary. At half the ring, `down` equals `up`.
    """

    row: Int[Array | np.ndarray, "*nSP"]
    slot: Int[Array | np.ndarray, "*nSP"]  # among the rank's own positions
    receives: Bool[Array | np.ndarray, "*nSP"]  # whether the expert from the other direction is stored there


class TransferRounds(NamedTuple):
    """Rounds of transfers, of which the first `num_rounds` of n are real.

    In each round all ranks send one expert `shift` ranks up and one `shift` ranks down. At half the ring both
    directions are the same, and everything is sent up.
    """

    num_rounds: Int[Array | np.ndarray, ""]
    shift: Int[Array | np.ndarray, " n"]
    up: PhysicalSlot
    down: PhysicalSlot


def encode(
    rounds: Sequence[tuple[int, Sequence[tuple[int, int, int, int, bool, bool]]]],
    max_rounds: int,
    stages: int,
    ranks: int,
    local_slots: int,
) -> TransferRounds:
    """Encode at most `max_rounds` rounds as arrays.

    A round is a shift and moves [stage, row, first position, second position, whether the first position receives the
    expert of the second, whether the second position receives the expert of the first]. Positions are numbered over all
    ranks.
    """
    shift, size = np.ones(max_rounds, np.int32), (max_rounds, stages, ranks)
    up, down = (
        PhysicalSlot(np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.bool_)) for _ in range(2)
    )
    for number, (distance, moves) in enumerate(rounds):
        shift[number] = distance
        for stage, row, first, second, first_receives, second_receives in moves:
            other = up if 2 * distance == ranks else down
            for direction, slot, receives in ((up, first, first_receives), (other, second, second_receives)):
                place = number, stage, slot // local_slots
                direction.row[place], direction.slot[place], direction.receives[place] = (
                    row,
                    slot % local_slots,
                    receives,
                )
        if 2 * distance == ranks:
            down.row[number], down.slot[number] = up.row[number], up.slot[number]
    return TransferRounds(np.asarray(len(rounds), np.int32), shift, up, down)


def migrate(leaves: Leaves, rounds: TransferRounds, axis: Axes) -> Leaves:
    """Return the leaves of stacks of experts after all rounds; leaves of a smaller dtype are sent as the largest one.

    In each round a rank sends two experts, or one at half the ring, even if no rank stores them.
    """
    ranks = jax.lax.axis_size(axis)
    here = jax.lax.axis_index(Axis.PIPELINE), jax.lax.axis_index(axis)
    branches = [partial(_send, distance=distance, axis=axis) for distance in range(1, ranks // 2 + 1)]

    def one_round(number: jax.Array, leaves: Leaves) -> Leaves:
        up, down = (PhysicalSlot(*(x[number][here] for x in place)) for place in (rounds.up, rounds.down))
        same = (up.row == down.row) & (up.slot == down.slot)
        sent = (
            read_expert(leaves, up.row, up.slot),
            read_expert(leaves, down.row, down.slot),
            up.receives,
            down.receives,
            same,
        )
        # everything is read before anything is written, and comes out of a branch: otherwise XLA would copy the arrays
        new_up, new_down = jax.lax.switch(rounds.shift[number] - 1, branches, *sent)
        return write_expert(write_expert(leaves, up.row, up.slot, new_up), down.row, down.slot, new_down)

    with jax.named_scope("migrate"):
        return jax.lax.fori_loop(0, rounds.num_rounds, one_round, leaves)


def _send(
    own_up: jax.Array,
    own_down: jax.Array,
    up_receives: jax.Array,
    down_receives: jax.Array,
    same: jax.Array,
    distance: int,
    axis: Axes,
) -> tuple[jax.Array, jax.Array]:
    """Return the experts to store at the positions that were sent up and down.

    Both may be the `same` position; the caller writes the one for down last.
    """
    ranks = jax.lax.axis_size(axis)
    up = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
    from_below = permuted(own_up, axis, up)
    if 2 * distance == ranks:
        new = jnp.where(up_receives, from_below, own_up)
        return new, new
    from_above = permuted(own_down, axis, [(there, rank) for rank, there in up])
    new_up = jnp.where(up_receives, from_above, own_up)
    return new_up, jnp.where(down_receives, from_below, jnp.where(same, new_up, own_down))


def read_expert(leaves: Leaves, row: Index, slot: Index) -> Float[Array, " n"]:
    """Return all parameters of one expert, flattened."""
    return jnp.concatenate(
        [jax.lax.dynamic_slice(leaf, _start(leaf, row, slot), (1, 1, *leaf.shape[2:])).ravel() for leaf in leaves]
    )


def write_expert(leaves: Leaves, row: Index, slot: Index, expert: Float[Array, " n"]) -> Leaves:
    """Return the leaves with another expert at a position."""
    sizes = [leaf[0, 0].size for leaf in leaves]
    parts = jnp.split(expert, np.cumsum(sizes)[:-1].tolist())
    return [
        jax.lax.dynamic_update_slice(
            leaf, part.reshape(1, 1, *leaf.shape[2:]).astype(leaf.dtype), _start(leaf, row, slot)
        )
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _start(leaf: jax.Array, row: Index, slot: Index) -> list[Any]:
    return [row, slot, *(0,) * (leaf.ndim - 2)]


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

    with jax.named_scope("all_reduce_replicated_experts"):
        count = jnp.sum(has_copies_RE)
        return jax.lax.fori_loop(
            0, depend_on_all(count, others, platform) if platform == "cpu" else count, sum_one, leaves
        )
