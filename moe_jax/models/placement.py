"""Where experts lie: each in a slot, of which rank r has those from r·L to (r+1)·L - 1. By default e is in slot e.

Gates, counts and losses know experts by their numbers. Orders know slots only: a decision is renamed for them, which
changes neither the order of an expert's rows nor that of a token's choices.

E experts, L of each rank, M blocks with experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.models.gates.choice import Choice
from moe_jax.models.orders.protocol import Room
from moe_jax.stages import Stages, segments


def in_slots(decision: Any, room: Room | None, slot_E: Int[Array, " E"] | None) -> tuple[Any, Room | None]:
    """A decision, and what earlier parts of the batch used, with slots instead of experts."""
    if slot_E is None:
        return decision, room
    assert isinstance(decision, Choice), "gates that fill slots load all experts alike"
    nobody_too_E = jnp.append(slot_E, len(slot_E))  # a choice that a token does without
    if room is not None:
        room = room._replace(used_E=jnp.zeros_like(room.used_E).at[slot_E].set(room.used_E, unique_indices=True))
    return decision._replace(expert_Tk=nobody_too_E[decision.expert_Tk]), room


def moe_blocks(stages: Stages) -> list[tuple[int, int, int]]:
    """Of each block with experts, from the bottom up: its segment, its place in a period, its row of the stacked
    arrays."""
    found = []
    for number, segment in enumerate(segments(stages.model)):
        for row in stages.stored_row(number):
            found += [(number, place, row) for place, kind in enumerate(segment.kinds) if kind == "moe"]
    return found


def by_expert(tree: Any, slot_ME: Int[Array, "M E"], stages: Stages) -> Any:
    """Parameters, or a state of them, whose experts lie in slots, in the order of experts."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for m, (segment, place, row) in enumerate(moe_blocks(stages)):
        rows.setdefault((segment, place), []).append((row, m))

    def sorted_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        group = expert_group(path)
        if group is None:
            return leaf
        row, m = (jnp.asarray(numbers) for numbers in zip(*rows[group], strict=True))
        return leaf.at[row].set(leaf[row[:, None], slot_ME[m]])

    return jax.tree.map_with_path(sorted_leaf, tree)


def expert_group(path: tuple[Any, ...]) -> tuple[int, int] | None:
    """Segment and place of the experts that a leaf of parameters, or of what is laid out like them, belongs to."""
    keys: list[Any] = [getattr(part, "key", None) for part in path]
    if "experts" not in keys:
        return None
    segment, place = keys[keys.index("segments") + 1 :][:2]
    return segment, place
