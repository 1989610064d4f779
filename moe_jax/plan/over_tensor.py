"""Duration of a dispatch in each form in which tensor ranks share an exchange (MoNTA, section IV).

One tensor rank's group has I bytes for the experts, the same on each of t tensor ranks until they drop the shares that
others send; there are e expert ranks. The stages of a form are the all-to-all, the gather over tensor ranks, and the
copy of rows to their destination.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Form = Literal["replicated", "sharded", "sharded_chunked", "sharded_overlapped", "sharded_scheduled"]
Seconds = Callable[[float], float]  # the `seconds` of a Linear or a Curve, by bytes


class LinkStages(NamedTuple):
    """The duration of each stage, by the bytes of a message."""

    exchange: Seconds
    gather: Seconds
    copy: Seconds


def stage_seconds(num_bytes: float, tensor: int, experts: int, chunks: int, stages: LinkStages) -> tuple[float, ...]:
    """Seconds of each stage for one of c chunks.

    They are the all-to-all of I/(c·t), the gather of I/c, of which 1/t is local, and the copy of I/c.
    """
    part = num_bytes / chunks
    return (
        stages.exchange(part / tensor * (experts - 1) / experts),
        stages.gather(part * (tensor - 1) / tensor),
        stages.copy(part),
    )


def form_seconds(form: Form, num_bytes: float, tensor: int, experts: int, chunks: int, stages: LinkStages) -> float:
    """Seconds until all rows are in place. `replicated`, `sharded` and `sharded_scheduled` ignore `chunks`.

    `sharded_chunked` is a pipeline of two stages, the exchange, and gather with copy; `sharded_overlapped` is one of
    three. The paper calls the forms O1, O2 and O3; its formulas for O3 leave out the case in which copies take longest.
    """
    if form == "replicated":
        return stages.exchange(num_bytes * (experts - 1) / experts)
    if form in ("sharded", "sharded_scheduled"):
        exchange, gather, _ = stage_seconds(num_bytes, tensor, experts, 1, stages)
        return exchange + gather
    exchange, gather, copy = stage_seconds(num_bytes, tensor, experts, chunks, stages)
    pipeline = (exchange, gather + copy) if form == "sharded_chunked" else (exchange, gather, copy)
    return sum(pipeline) + (chunks - 1) * max(pipeline)
