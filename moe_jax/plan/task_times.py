"""Task durations by alpha-beta models of measured costs.

Amounts are those of one device's whole batch; split into r parts, a part takes alpha + amount/r · beta (FSMoE, eq. 1).
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_jax.schedule.actions import Action, Seconds
from moe_jax.schedule.shape import StepShape


class Cost(Protocol):
    """A cost model: seconds by amount."""

    def seconds(self, amount: float, parts: int = 1) -> float:
        """Seconds of one of `parts` equal parts."""
        ...


@dataclass(frozen=True)
class Linear:
    """An alpha-beta model: a start-up time plus an amount (bytes or flops) at a rate.

    With a ramp, the amount is sent in pieces over several hops, and only many pieces keep all hops busy. With the best
    number of pieces, hops that start pieces in `ramp_s` together add twice the geometric mean of that and of the time
    at the rate.
    """

    alpha_s: float
    beta_s: float  # per byte or flop
    ramp_s: float = 0.0

    def seconds(self, amount: float, parts: int = 1) -> float:
        """Seconds of one of `parts` equal parts."""
        return self.alpha_s + self.beyond_start_s(amount / parts)

    def beyond_start_s(self, amount: float) -> float:
        """Seconds of an amount without the start-up time."""
        at_rate_s = amount * self.beta_s
        return at_rate_s + 2 * math.sqrt(self.ramp_s * at_rate_s) if self.ramp_s else at_rate_s


@dataclass(frozen=True, kw_only=True)
class ComputeStage:
    """The amounts of a compute stage, floating-point operations or seconds, which `rate` converts to seconds."""

    rate: Linear
    forward: float
    backward: float  # gradients of activations
    weight: float = 0.0  # gradients of weights

    def seconds(self, action: Action, shape: StepShape) -> float:
        """Seconds of one task."""
        amounts = {"F": self.forward, "B": self.backward, "W": self.weight}

        def of(direction: str, parts: int) -> float:
            free = direction == "W" and not self.weight
            return 0.0 if free else self.rate.seconds(amounts[direction], parts)

        return task_seconds(action, shape, of)


class TaskStage(Protocol):
    """The durations of the tasks of one op, e.g. `ComputeStage`. They are the same for all blocks and parts."""

    def seconds(self, action: Action, shape: StepShape) -> float:
        """Seconds of one task."""
        ...


def task_seconds(action: Action, shape: StepShape, of: Callable[[str, int], float]) -> float:
    """Seconds of a compute task by `of(direction, parts)`. With inline weight gradients a B task includes its W."""
    parts = shape.num_parts(action.direction, action.op)
    whole = action.direction == "B" and not shape.split_weight_grad
    return of(action.direction, parts) + (of("W", parts) if whole else 0.0)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes of rows that a communication stage moves, the same in both directions."""

    link: Cost
    num_bytes: float
    more_s: tuple[float, float] = (0.0, 0.0)  # what its tasks send besides, forward and backward

    def seconds(self, direction: str, parts: int) -> float:
        """Seconds of one of `parts` equal parts."""
        return self.link.seconds(self.num_bytes, parts) + self.more_s[direction == "B"] / parts


@dataclass(frozen=True, kw_only=True)
class TaskTimes:
    """Costs of all tasks of a step."""

    compute: Mapping[str, TaskStage]  # embed, attend (with the gate), dense (attention and MLP), expert, head
    transfer: Mapping[str, Transfer]  # dispatch, combine; gather, scatter if experts are sharded
    reduce: Linear  # sums over devices and gathers of parameters, per byte
    reduction_bytes: tuple[tuple[float, ...], ...]  # by owner (embed, blocks, head) and bucket
    counts_bytes: float = 0.0  # the router counts of all blocks
    gather_bytes: tuple[Mapping[str, float], ...] = ()  # parameters that leave a device, by owner and op

    def of(self, shape: StepShape) -> Seconds:
        """Seconds of each task of a shape."""

        @functools.cache
        def of_op(direction: str, op: str, dense: bool) -> float:
            if op in self.transfer:
                return self.transfer[op].seconds(direction, shape.num_parts(direction, op))
            return self.compute["dense" if dense else op].seconds(Action(direction, op, 0, 0), shape)

        sent_s = functools.cache(self.reduce.seconds)  # buckets of a model have few sizes

        def seconds(action: Action) -> float:
            direction, op, block, _ = action
            if direction == "G":
                return sent_s(self._bytes_of(action))
            if direction == "P":
                return sent_s(self.gather_bytes[owner_of(action)][op])
            return of_op(direction, op, op == "attend" and shape.kinds[block] == "dense")

        return seconds

    def _bytes_of(self, action: Action) -> float:
        if action.op == "counts":
            return self.counts_bytes
        return self.reduction_bytes[owner_of(action)][action.part]


def owner_of(action: Action) -> int:
    """The index of the owner of summed gradients, or of gathered parameters: 0 is the embedding, -1 the head, blocks
    are between them.
    """
    return _ENDS.get(action.op, action.block + 1)


_ENDS = {"embed": 0, "head": -1}
