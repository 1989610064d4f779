"""Messages and durations of the all-to-all algorithms, inside nodes and between them, by closed forms.

Every rank has one block of equal size for each rank, its own included. A node's first rank is its leader, the others
are members.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from moe_jax.plan.task_times import Linear


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Messages of one kind that are all sent at the same time."""

    name: str  # the named scope of its collectives; empty: no scope of their own
    link: Literal["inside", "between"]
    senders: Literal["all", "leaders", "members"] = "all"
    messages: int  # per sender
    message_bytes: float
    received: int  # messages per receiver


Steps = tuple[tuple[Phase, ...], ...]  # steps run sequentially, phases of a step concurrently


class SentBytes(NamedTuple):
    """Messages and bytes that one rank sends."""

    messages: int
    num_bytes: float


class Traffic(NamedTuple):
    """Messages and bytes that one rank sends inside its node and to other nodes."""

    inside: SentBytes
    between: SentBytes


@dataclass(frozen=True, kw_only=True)
class Links:
    """Durations of a message by its bytes. Ranks that share a network adapter wait for each other."""

    inside: Linear
    between: Linear  # with an adapter of its own
    ranks_per_adapter: float = 1


def _flat(nodes: int, local: int, block: float) -> Steps:
    return ((_all("", "inside", local - 1, block), _all("", "between", (nodes - 1) * local, block)),)


def _hier_2d(nodes: int, local: int, block: float) -> Steps:
    inside = _all("inside", "inside", local - 1, nodes * block)
    return (inside,), (_all("between", "between", nodes - 1, local * block),)


def _halo(nodes: int, local: int, block: float) -> Steps:
    own = _all("own", "inside", local - 1, block)
    between = _all("between", "between", nodes - 1, local * block)
    onward = _all("onward", "inside", local - 1 if nodes > 1 else 0, (nodes - 1) * block)
    return (own, between), (onward,)


def _hier_1d(nodes: int, local: int, block: float) -> Steps:
    rows = nodes * local * block  # bytes of one rank
    between = _all("between", "between", nodes - 1, local**2 * block)
    return (
        (Phase(name="gather", link="inside", senders="members", messages=1, message_bytes=rows, received=local - 1),),
        (replace(between, senders="leaders"),),
        (Phase(name="scatter", link="inside", senders="leaders", messages=local - 1, message_bytes=rows, received=1),),
    )


def _all(name: str, link: Literal["inside", "between"], messages: int, message_bytes: float) -> Phase:
    return Phase(name=name, link=link, messages=messages, message_bytes=message_bytes, received=messages)


_FORMS: Mapping[str, Callable[[int, int, float], Steps]] = {
    "flat": _flat,
    "hier_2d": _hier_2d,
    "halo": _halo,
    "hier_1d": _hier_1d,
}
ALGORITHMS = tuple(_FORMS)


def steps_of(algorithm: str, num_bytes: float, nodes: int, per_node: int) -> Steps:
    """The steps of an exchange of `num_bytes` that each rank has for all ranks, without empty phases."""
    steps = _FORMS[algorithm](nodes, per_node, num_bytes / (nodes * per_node))
    busy = (tuple(phase for phase in step if phase.messages and phase.received) for step in steps)
    return tuple(step for step in busy if step)


def traffic(phases: Iterable[Phase], leader: bool) -> Traffic:
    """Messages and bytes that a leader or a member sends in these phases."""
    own = [phase for phase in phases if phase.senders in ("all", "leaders" if leader else "members")]

    def sent(link: str) -> SentBytes:
        used = [phase for phase in own if phase.link == link]
        return SentBytes(sum(each.messages for each in used), sum(each.messages * each.message_bytes for each in used))

    return Traffic(sent("inside"), sent("between"))


def exchange_seconds(algorithm: str, num_bytes: float, nodes: int, per_node: int, links: Links) -> float:
    """Seconds until every rank has its rows. A message takes alpha + bytes · beta at the busiest sender or receiver."""
    steps = steps_of(algorithm, num_bytes, nodes, per_node)
    return sum(max(_phase_seconds(phase, links) for phase in step) for step in steps)


def ring_seconds(num_bytes: float, nodes: int, per_node: int, links: Links) -> float:
    """Seconds of a ring that sends one block per hop.

    In the first and last hops only some ranks send to another node.
    """
    ranks = nodes * per_node
    block = num_bytes / ranks
    leaving = (min(hop, ranks - hop, per_node) if nodes > 1 else 0 for hop in range(1, ranks))
    waiting = (min(count, links.ranks_per_adapter) for count in leaving)
    return sum(max(count * links.between.seconds(block), links.inside.seconds(block)) for count in waiting)


def _phase_seconds(phase: Phase, links: Links) -> float:
    link = links.inside if phase.link == "inside" else links.between
    sharers = links.ranks_per_adapter if phase.link == "between" and phase.senders == "all" else 1
    return sharers * max(phase.messages, phase.received) * link.seconds(phase.message_bytes)
