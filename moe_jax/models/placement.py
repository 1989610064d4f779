"""The placement of experts on ranks. Rank r has positions r·L to (r+1)·L - 1; by default expert e is at position e.

`slot_E` is the position of each expert of a block. If experts may have copies, there are S > E positions, and
`expert_S` describes the placement instead: the expert of each position, E for a free position. Code that only passes
either on calls both slot_E.

Gates, counts and losses index experts. Dispatchers index positions only: a decision is renumbered for them, which
changes neither the order of an expert's rows nor that of a token's choices.

E experts, L positions of each rank, M blocks with experts, R rows of a stack of blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from moe_jax.config import MoEConfig
from moe_jax.config.expert_shares import expert_counts
from moe_jax.config.layer_layout import Stages, segments
from moe_jax.models.dispatchers.protocol import CapacityState
from moe_jax.models.gates.choice import Decision, TopKRouting, tokens_per_expert

_GOLDEN = 0x9E3779B9  # 2³² divided by the golden ratio


def first_experts(experts: int, ranks: int, replicas: int, speed_P: Sequence[float] | None = None) -> NDArray[np.int32]:
    """Return `expert_S` without copies: experts in order, and the last positions of each rank free.

    Ranks hold equally many experts or, if they have different speeds, so many that equal loads are computed soonest.
    """
    most = experts // ranks + replicas
    counts = expert_counts(experts, speed_P or [1.0] * ranks, most)
    expert_PL = np.full((ranks, most), experts, np.int32)
    expert_PL[np.arange(most) < np.asarray(counts)[:, None]] = np.arange(experts)
    return expert_PL.ravel()


def in_slots(
    decision: Decision,
    capacity: CapacityState | None,
    slot_E: Int[Array, " _"] | None,
    moe: MoEConfig,
    speed_P: tuple[float, ...] | None = None,
) -> tuple[Decision, CapacityState | None, MoEConfig]:
    """Renumber a decision, and what earlier parts of the batch used, from experts to positions.

    `speed_P`: speeds of the ranks, by which the copies of an expert share its tokens; None: all equal. Returns both
    with the settings of a layer that has this number of positions.
    """
    if slot_E is None:
        return decision, capacity, moe
    assert isinstance(decision, TopKRouting), "gates that fill slots load all experts alike"
    if len(slot_E) > moe.num_experts:  # without a capacity, what was used does not matter
        length = None if capacity is None or capacity.buffer is None else capacity.buffer.tokens
        slot_Tk = slots_of_pairs(decision.expert_Tk, slot_E, moe.num_experts, speed_P, length)
        return decision._replace(expert_Tk=slot_Tk), capacity, dataclasses.replace(moe, num_experts=len(slot_E))
    slot_or_none_E = jnp.append(slot_E, len(slot_E))  # index E: no expert
    if capacity is not None:
        used_E = jnp.zeros_like(capacity.used_E).at[slot_E].set(capacity.used_E, unique_indices=True)
        capacity = capacity._replace(used_E=used_E)
    return decision._replace(expert_Tk=slot_or_none_E[decision.expert_Tk]), capacity, moe


def slots_of_pairs(
    expert_Tk: Int[Array, "T k"],
    expert_S: Int[Array, " S"],
    experts: int,
    speed_P: Sequence[float] | None = None,
    length: int | None = None,
) -> Int[Array, "T k"]:
    """Return the position of each pair. The copies of an expert take tokens in turn or, on ranks of different speeds,
    in proportion to these. `length`: the tokens of a sequence, of which each is shared like the others, so that the
    rows that fit into buffers are the same however a batch is split; None: all tokens are shared as one sequence.

    Position S means no expert: the token skips this choice.
    """
    copies_E = tokens_per_expert(expert_S[:, None], experts)
    slot_S = jnp.argsort(expert_S)  # makes copies of an expert neighbours
    first_E = jnp.cumsum(copies_E) - copies_E
    chosen_Tk = jnp.minimum(expert_Tk, experts - 1)
    token_T1 = jnp.arange(len(expert_Tk), dtype=jnp.int32)[:, None] % (length or len(expert_Tk))
    if speed_P is None:
        copy_Tk = token_T1 % copies_E[chosen_Tk]
    else:
        speed_S = jnp.repeat(jnp.asarray(speed_P, jnp.float32), len(expert_S) // len(speed_P))[slot_S]
        upto_S = jnp.cumsum(speed_S)
        before_E = (upto_S - speed_S)[first_E]
        all_E = upto_S[first_E + copies_E - 1] - before_E
        # multiples of the golden ratio, modulo 1, are spread evenly however many of them there are
        place_T1 = (token_T1.astype(jnp.uint32) * jnp.uint32(_GOLDEN)).astype(jnp.float32) / 2.0**32
        place_Tk = before_E[chosen_Tk] + place_T1 * all_E[chosen_Tk]
        copy_Tk = jnp.searchsorted(upto_S, place_Tk, side="right", method="scan_unrolled")  # no loop in the program
        copy_Tk = jnp.clip(copy_Tk - first_E[chosen_Tk], 0, copies_E[chosen_Tk] - 1)
    slot_Tk = slot_S[first_E[chosen_Tk] + copy_Tk]
    return jnp.where(expert_Tk < experts, slot_Tk, len(expert_S))


def first_slots(slot_ME: Int[Array, "M _"], experts: int) -> Int[Array, "M E"]:
    """Return the position of each expert; of an expert with copies, the position of the first."""
    if slot_ME.shape[1] == experts:
        return slot_ME
    return jnp.argmax(slot_ME[:, None, :] == jnp.arange(experts)[:, None], axis=2)


def moe_blocks(stages: Stages) -> list[tuple[int, int, int]]:
    """Locate each block with experts, from the bottom up.

    Returns its segment, its place in a period, and its row of the stacked arrays.
    """
    blocks = []
    for number, segment in enumerate(segments(stages.model)):
        for row in stages.stored_row(number):
            blocks += [(number, place, row) for place, kind in enumerate(segment.kinds) if kind == "moe"]
    return blocks


def by_expert(tree: Any, slot_ME: Int[Array, "M _"], stages: Stages) -> Any:
    """Reorder experts from positions to the order of experts, with one copy of each.

    `tree` holds parameters, or a state that is laid out like parameters.
    """
    experts = stages.model.moe.num_experts
    slot_ME = first_slots(slot_ME, experts)
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for m, (segment, place, row) in enumerate(moe_blocks(stages)):
        rows.setdefault((segment, place), []).append((row, m))

    def sorted_leaf(group: tuple[int, int], leaf: jax.Array) -> jax.Array:
        row, m = (jnp.asarray(numbers) for numbers in zip(*rows[group], strict=True))
        return leaf[:, :experts].at[row].set(leaf[row[:, None], slot_ME[m]])

    return map_experts(sorted_leaf, tree)


def by_slot(tree: Any, expert_S: Int[Array | np.ndarray, " S"]) -> Any:
    """Do the inverse, where all blocks have the same placement: reorder experts to positions, with 0 at free ones."""
    return map_experts(lambda _, leaf: jnp.take(leaf, expert_S, axis=1, mode="fill", fill_value=0), tree)


def slot_shapes(shapes: Any, slots: int) -> Any:
    """Return the shapes of parameters with `slots` positions of experts, sharded as before."""

    def with_slots(_: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0], slots, *x.shape[2:]), x.dtype, sharding=x.sharding)

    return map_experts(with_slots, shapes)


def map_experts(function: Any, tree: Any) -> Any:
    """Apply `function(group, leaf)` to each leaf [R, E, …] of stacked experts; other leaves are unchanged."""

    def mapped(path: tuple[Any, ...], leaf: Any) -> Any:
        group = expert_group(path)
        return leaf if group is None else function(group, leaf)

    return jax.tree.map_with_path(mapped, tree)


def expert_group(path: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return segment and place of the experts that a leaf belongs to, or None if it belongs to none.

    `path` is the path of the leaf in parameters, or in a tree that is laid out like them.
    """
    keys: list[Any] = [getattr(part, "key", None) for part in path]
    if "experts" not in keys:
        return None
    segment, place = keys[keys.index("segments") + 1 :][:2]
    return segment, place
