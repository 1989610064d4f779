"""The shares of a collective's bytes that stay inside a node and that go to other nodes."""

from typing import NamedTuple


class Shares(NamedTuple):
    """Shares of the bytes that leave a rank."""

    inside: float
    between: float


def shares(ranks: int, per_node: int, relayed: bool) -> Shares:
    """The shares for a rank of a group of `ranks` (two or more), of which `per_node` are on its node, itself included.

    An all-to-all has a block for every rank, which is sent there directly. Data that all ranks of another node need
    alike (the parts of an all-gather; in reverse, those of a sum) is `relayed`: it is assumed to be sent there once,
    with an equal part by each rank of a node, and passed on inside. Hierarchical algorithms do so.
    """
    between = (ranks - per_node) / (ranks - 1) / (per_node if relayed else 1)
    return Shares(1 - between, between)


def ring_shares(per_node: int) -> Shares:
    """The shares of a rank in rings of NCCL over several nodes: each rank is the last one of its node in an equal part.

    Every part of an all-gather passes through every node, also on the way back to where it came from.
    """
    return Shares(1 - 1 / per_node, 1 / per_node)
