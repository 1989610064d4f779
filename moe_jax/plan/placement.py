"""The placement of context ranks, which shard sequences, relative to expert ranks (MoNTA, "Cluster Expansion")."""

from typing import NamedTuple


class Placement(NamedTuple):
    """The axes of a mesh, the one with the nearest neighbours first, and the reason."""

    axes: tuple[str, ...]
    shared: bool  # whether the same ranks shard sequences and experts
    reason: str


def place(context: int, expert: int, tensor: int, fast_devices: int) -> Placement:
    """The placement for these numbers of ranks, with fast links between `fast_devices` neighbours.

    Context and expert ranks have axes of their own if there are fewer context ranks and fast links span both, or if
    neither number divides the other; else they share one axis of the larger number.
    """
    spanned = tensor * expert * context
    smaller, larger = sorted((context, expert))
    own = ("tensor", "expert", "context", "pipeline", "data")
    if context < expert and spanned <= fast_devices:
        reason = f"context={context} is less than expert={expert}, and fast links join {fast_devices} devices"
        return Placement(own, False, reason)
    if larger % smaller:
        return Placement(own, False, f"context={context} and expert={expert} do not divide each other")
    if context >= expert:
        reason = f"context={context} is at least expert={expert}: the ranks of a sequence hold all experts"
    else:
        reason = f"fast links join {fast_devices} devices, not tensor × expert × context = {spanned}"
    return Placement(("tensor", "expert+context", "pipeline", "data"), True, reason)
