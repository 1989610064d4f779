"""How long rows take to the experts in each form that tensor ranks can share an exchange in (MoNTA, section IV).

I bytes that one tensor rank's group has for the experts, the same on each of t tensor ranks until they drop what others
send; e expert ranks. A form's stages are the all-to-all, the gather over tensor ranks, and the copy to the rows' place.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Form = Literal["replicated", "o1", "o2", "o3"]
Seconds = Callable[[float], float]  # by bytes: a Linear's or a Curve's `seconds`


class LinkStages(NamedTuple):
    """What the bytes of a message take in each stage."""

    exchange: Seconds
    gather: Seconds
    copy: Seconds


def stage_seconds(num_bytes: float, tensor: int, experts: int, chunks: int, stages: LinkStages) -> tuple[float, ...]:
    """Of one of c chunks: the all-to-all of I/(c·t), the gather of I/c of which 1/t is there, the copy of I/c."""
    part = num_bytes / chunks
    return (
        stages.exchange(part / tensor * (experts - 1) / experts),
        stages.gather(part * (tensor - 1) / tensor),
        stages.copy(part),
    )


def form_seconds(form: Form, num_bytes: float, tensor: int, experts: int, chunks: int, stages: LinkStages) -> float:
    """Until all rows are in their place. `replicated` and `o1` are not cut, whatever `chunks` says.

    O2 is a pipeline of two stages, the exchange, and gather with copy; O3 one of three. The paper's formulas for O3
    leave out the case that copies take longest.
    """
    if form == "replicated":
        return stages.exchange(num_bytes * (experts - 1) / experts)
    if form == "o1":
        exchange, gather, _ = stage_seconds(num_bytes, tensor, experts, 1, stages)
        return exchange + gather
    exchange, gather, copy = stage_seconds(num_bytes, tensor, experts, chunks, stages)
    pipeline = (exchange, gather + copy) if form == "o2" else (exchange, gather, copy)
    return sum(pipeline) + (chunks - 1) * max(pipeline)
