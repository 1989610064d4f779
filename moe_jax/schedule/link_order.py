"""Whose transfers go first where several want one link: experts', stages', context ranks', then sums of gradients.

MoNTA ("Communication Conflict"): the sooner something waits for a transfer, the sooner it goes.
"""

from collections.abc import Mapping
from enum import IntEnum
from itertools import accumulate


class Priority(IntEnum):
    """What is sent, the most urgent first."""

    EXPERT = 0  # rows, for which the pass itself waits
    PIPELINE = 1  # activations and gradients between stages, for which the next pass waits
    CONTEXT = 2  # keys and values of later hops
    DATA = 3  # sums, for which nothing waits before the end of the step


def finished_s(wanted_s: Mapping[Priority, float]) -> dict[Priority, float]:
    """When each kind has been sent over a link that all want from second 0 on, for so many seconds each."""
    kinds = sorted(wanted_s)
    return dict(zip(kinds, accumulate(wanted_s[kind] for kind in kinds), strict=True))
