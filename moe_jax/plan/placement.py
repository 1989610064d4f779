"""Where context ranks go, which cut sequences, beside expert ranks (MoNTA, "Cluster Expansion")."""

from typing import NamedTuple

from moe_jax.errors import ConfigError


class Placement(NamedTuple):
    """Axes of a mesh, neighbours first, and why."""

    axes: tuple[str, ...]
    shared: bool  # whether the same ranks cut sequences and experts
    reason: str


def place(context: int, expert: int, tensor: int, fast_devices: int) -> Placement:
    """For so many ranks along each axis, where `fast_devices` neighbours are joined by fast links.

    Context and expert ranks have axes of their own if context ranks are fewer and fast links span both; else they share
    one, of the larger number. Raises ConfigError if the smaller one does not divide it.
    """
    spanned = tensor * expert * context
    if context < expert and spanned <= fast_devices:
        reason = f"context={context} is less than expert={expert}, and fast links join {fast_devices} devices"
        return Placement(("tensor", "expert", "context", "pipeline", "data"), False, reason)
    smaller, larger = sorted((context, expert))
    if larger % smaller:
        raise ConfigError(
            f"context={context} is to share an axis with expert={expert}, and neither divides the other: "
            f"use a divisor or a multiple of {expert}"
        )
    if context >= expert:
        reason = f"context={context} is at least expert={expert}: the ranks of a sequence hold all experts"
    else:
        reason = f"fast links join {fast_devices} devices, not tensor × expert × context = {spanned}"
    return Placement(("tensor", "expert+context", "pipeline", "data"), True, reason)
