"""Where context ranks go, which cut sequences, beside expert ranks (MoNTA, "Cluster Expansion")."""

from typing import NamedTuple


class Placement(NamedTuple):
    """Axes of a mesh, neighbours first, and why."""

    axes: tuple[str, ...]
    shared: bool  # whether the same ranks cut sequences and experts
    reason: str


def place(context: int, expert: int, tensor: int, fast_devices: int) -> Placement:
    """For so many ranks along each axis, where `fast_devices` neighbours are joined by fast links.

    Context and expert ranks have axes of their own if context ranks are fewer and fast links span both, or if neither
    number divides the other; else they share one, of the larger number.
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
