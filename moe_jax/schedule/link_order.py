"""Priorities of transfers that share a link: experts, then stages, then context ranks, then parameters, then
sums of gradients.

This follows MoNTA ("Communication Conflict"): the sooner a task waits for a transfer, the sooner it is sent.
"""

from collections.abc import Mapping
from enum import IntEnum
from itertools import accumulate


class Priority(IntEnum):
    """Kinds of transfers, the most urgent first."""

    EXPERT = 0  # rows; the pass itself waits for them
    PIPELINE = 1  # activations and gradients between stages; the next pass waits for them
    CONTEXT = 2  # keys and values of later hops
    PARAMETERS = 3  # of the next block; its tasks wait for them
    DATA = 4  # sums of gradients; nothing waits for them before the end of the step


def finish_times_s(wanted_s: Mapping[Priority, float]) -> dict[Priority, float]:
    """When each kind of transfer ends, in seconds, if all are ready at time 0.

    `wanted_s` are the seconds that each kind occupies the link.
    """
    kinds = sorted(wanted_s)
    return dict(zip(kinds, accumulate(wanted_s[kind] for kind in kinds), strict=True))
