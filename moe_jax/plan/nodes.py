"""Which share of a collective's bytes stays inside a node, and which goes to other nodes."""

from typing import NamedTuple


class Shares(NamedTuple):
    """Of the bytes that leave a rank."""

    inside: float
    between: float


def shares(ranks: int, per_node: int, relayed: bool) -> Shares:
    """For a rank of a group of `ranks`, two or more, of which `per_node` share its node, itself included.

    An all-to-all has a block for every rank, which goes straight there. What all ranks of another node want alike (the
    parts of an all-gather; those of a sum, the other way round) is `relayed`: taken to be sent there once, each rank of
    a node sending its part of that, and passed on inside, as hierarchical algorithms do, and rings that leave a node
    at each of its ranks.
    """
    between = (ranks - per_node) / (ranks - 1) / (per_node if relayed else 1)
    return Shares(1 - between, between)
