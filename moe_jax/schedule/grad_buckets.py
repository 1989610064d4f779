"""Gradients that are summed over devices, in chunks, and where the chunks go between the exchanges."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from moe_jax.schedule.actions import Action, Seconds, StreamOf, is_reduction
from moe_jax.schedule.dependencies import Needs, all_reductions
from moe_jax.schedule.link_order import Priority
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import simulate_streams


class Bucket(NamedTuple):
    """Elements [start, stop) of one group of an owner's gradients, flattened: one reduction."""

    group: int
    start: int
    stop: int


def cut(
    group_sizes: Sequence[int], bucket_cap_mb: float | None, item_bytes: int | Sequence[int] = 4
) -> tuple[Bucket, ...]:
    """Chunks of at most `bucket_cap_mb` MB (10⁶ bytes; None: no limit), as equal as whole elements allow.

    `group_sizes` are counts of elements; the gradients of a group are summed over the same devices, and a chunk never
    holds two groups. Part c of an owner's reductions is chunk c. `item_bytes` are those of an element, of each group
    or of all.
    """
    each = [item_bytes] * len(group_sizes) if isinstance(item_bytes, int) else item_bytes
    chunks = []
    for group, (size, num_bytes) in enumerate(zip(group_sizes, each, strict=True)):
        limit = math.inf if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 1e6 / num_bytes))
        count = math.ceil(size / limit) or (1 if size else 0)
        bounds = [size * i // count for i in range(count + 1)] if count else []
        chunks += [Bucket(group, start, stop) for start, stop in pairwise(bounds)]
    return tuple(chunks)


def by_readiness(compute: Sequence[Action], shape: StepShape, needs: Needs) -> list[Action]:
    """All reductions in the order in which their last gradient is computed."""
    place = {action: i for i, action in enumerate(compute)}
    return sorted(all_reductions(shape), key=lambda task: max(place[need] for need in needs[task]))


def fill_gaps(issued: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf) -> list[Action]:
    """The same tasks by the time at which they start if a reduction runs only while no exchange is ready (FlowMoE)."""
    return list(simulate_streams(issued, needs, seconds, stream_of, rank_of=exchanges_first))


def exchanges_first(action: Action) -> int:
    """Any exchange that is ready goes before any reduction."""
    return Priority.DATA if is_reduction(action) else Priority.EXPERT
