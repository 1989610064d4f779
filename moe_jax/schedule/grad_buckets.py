"""Gradient buckets: how gradients are split for reductions, and where the reductions go between the exchanges."""

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from moe_jax.errors import ConfigError
from moe_jax.schedule.actions import Action, Seconds, StreamOf, is_param_gather, is_reduction
from moe_jax.schedule.dependencies import Needs, reductions_by_owner
from moe_jax.schedule.link_order import Priority
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import NumberedTasks, simulate_streams

MAX_BUCKETS = 4096  # of a group of gradients: each is a collective, and compilers take seconds for hundreds of them


class Bucket(NamedTuple):
    """The elements [start, stop) of one flattened group of an owner's gradients. A bucket is reduced at once."""

    group: int
    start: int
    stop: int


def split_into_buckets(
    group_sizes: Sequence[int],
    bucket_cap_mb: float | None,
    item_bytes: int | Sequence[int] = 4,
    slices: Sequence[Sequence[int]] | None = None,
) -> tuple[Bucket, ...]:
    """Split groups of gradients into buckets of at most `bucket_cap_mb` MB (10⁶ bytes; None: no limit).

    Buckets of a group are as equal as whole slices allow. `group_sizes` are counts of elements. The gradients of a
    group are summed over the same devices, and a bucket never spans two groups. Part c of an owner's reductions is
    bucket c. `item_bytes` is the size of an element, one number for all groups or one for each. `slices` are the
    elements of an array's slices for each group, from coarse to fine, as experts and rows: each divides the one before.
    A bucket has whole slices of the coarsest kind that fits into it, and all of its finer slices are in the same
    coarser one. The default, and what is left if none fits, are single elements.

    Raises ConfigError for more than `MAX_BUCKETS` of a group.
    """
    each = [item_bytes] * len(group_sizes) if isinstance(item_bytes, int) else item_bytes
    kinds = slices or [()] * len(group_sizes)
    chunks = []
    for group, (size, num_bytes, kind) in enumerate(zip(group_sizes, each, kinds, strict=True)):
        limit = elements_of(bucket_cap_mb, num_bytes, size)
        count = _layout(size, limit, kind).buckets
        if count > MAX_BUCKETS:
            raise ConfigError(
                f"schedule.bucket_cap_mb={bucket_cap_mb} splits {size * num_bytes / 1e6:.3g} MB of gradients, which "
                f"are summed over the same devices, into {count} buckets, more than {MAX_BUCKETS}: use "
                f"{_least_cap_mb(size, num_bytes, kind)} or more, or null"
            )
        chunks += [Bucket(group, start, stop) for start, stop in pairwise(_bounds(size, limit, kind))]
    return tuple(chunks)


def elements_of(bucket_cap_mb: float | None, item_bytes: int, size: int) -> int:
    """The most elements of a bucket of a group of `size`."""
    return size if bucket_cap_mb is None else max(1, int(min(bucket_cap_mb * 1e6 / item_bytes, size)))


class _Layout(NamedTuple):
    """How a group is split: `pieces` buckets in each coarser slice of `around` elements, of whole slices of `each`."""

    around: int
    each: int
    pieces: int
    buckets: int  # of the group


def _layout(size: int, limit: int, slices: Sequence[int]) -> _Layout:
    if not size:
        return _Layout(1, 1, 0, 0)
    around = size
    for each in slices:
        if each <= limit:
            break
        around = each
    else:
        each = 1
    number = math.ceil(around / each)
    pieces = math.ceil(number / min(limit // each, number))
    return _Layout(around, each, pieces, pieces * math.ceil(size / around))


def _bounds(size: int, limit: int, slices: Sequence[int]) -> list[int]:
    """Where the buckets of a group start, and its size."""
    around, each, pieces, _ = _layout(size, limit, slices)
    number = math.ceil(around / each)
    starts = [each * (number * i // pieces) for i in range(pieces)]
    bounds = (first + start for first in range(0, size, around) for start in starts)
    return [bound for bound in bounds if bound < size] + [size]


def _least_cap_mb(size: int, item_bytes: int, slices: Sequence[int]) -> float:
    """A limit near the smallest that gives a group no more than `MAX_BUCKETS`, in MB."""
    elements = math.ceil(size / MAX_BUCKETS)
    while _layout(size, elements, slices).buckets > MAX_BUCKETS:
        elements += math.ceil(elements / 64)
    return (elements * item_bytes // 100 + 1) / 1e4


def by_readiness(compute: Sequence[int], shape: StepShape, tasks: NumberedTasks) -> list[int]:
    """All reductions, sorted by when their last gradient is computed. Tasks are numbered as in `tasks`."""
    place = {task: i for i, task in enumerate(compute)}
    # buckets of an owner need the same tasks
    owners = [tasks.numbers(sums) for sums in reductions_by_owner(shape)]
    owners.sort(key=lambda sums: max(map(place.__getitem__, tasks.needs[sums[0]])))
    return list(itertools.chain.from_iterable(owners))


def fill_gaps(issued: Sequence[Action], needs: Needs, seconds: Seconds, stream_of: StreamOf) -> list[Action]:
    """Sort tasks by start time, with gathers of parameters and reductions only while no exchange is ready (FlowMoE)."""
    return list(simulate_streams(issued, needs, seconds, stream_of, rank_of=exchanges_first))


def exchanges_first(action: Action) -> int:
    """The priority of a task on its stream: any exchange that is ready goes before any gather of parameters, and that
    before any reduction.
    """
    if is_param_gather(action):
        return Priority.PARAMETERS
    return Priority.DATA if is_reduction(action) else Priority.EXPERT
