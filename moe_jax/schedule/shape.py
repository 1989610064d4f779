"""The shape of a step: its blocks, and the number of parts that each kind of task is split into."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from moe_jax.schedule.actions import NO_BLOCK, Action, ScheduleError, Stream, stream_of_op

KINDS = ("dense", "moe")
WEIGHT_GRADS = ("inline", "greedy")
GRAD_REDUCES = ("end", "block", "bucketed")
PARAM_GATHERS = ("none", "block", "prefetch")
_PER_MICROBATCH = ("embed", "attend", "head")
_WITH_WEIGHTS = ("attend", "expert", "head")
_WITH_PARAMETERS = ("embed", *_WITH_WEIGHTS)


class Parts(NamedTuple):
    """The numbers of equal parts of a device's batch. Exchanges and experts may have more parts than other tasks."""

    microbatches: int  # parts of embedding, attention and head
    chunks: int  # parts of exchanges and experts; a multiple of microbatches


_WHOLE = Parts(1, 1)


class ChainStage(NamedTuple):
    """One stage of the forward chain, with all its parts."""

    op: str
    block: int


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The tasks of a step, before they have an order. Raises ScheduleError if the numbers do not fit.

    The backward pass may have fewer microbatches than the forward pass: one backward task then covers several forward
    ones. A dense block is one `attend` task, which includes its MLP. The owners of gradients are the embedding, the
    blocks and the head.
    """

    kinds: tuple[str, ...]  # dense or moe, from the bottom up
    forward: Parts = _WHOLE
    backward: Parts = _WHOLE
    weight_grad: str = "inline"  # inline: B tasks include it; greedy: W tasks
    grad_reduce: str = "end"  # when gradients are summed: after the backward pass, per block, in buckets
    reductions: tuple[int, ...] = ()  # buckets per owner; (): one each; 0: nothing to sum
    sharded_experts: bool = False  # gather tokens before the experts, scatter sums after them
    tied: bool = False  # embedding and head are one matrix, owned by embed
    param_gather: str = "none"  # when a block's parameters are gathered (param_gathers.py); none: they are not sharded
    mtp: bool = False  # the highest block is that of multi-token prediction, which also computes with the last norm
    local_experts: bool = False  # no other device shares a device's experts: they are neither gathered nor reduced

    def __post_init__(self) -> None:
        if not self.reductions:
            object.__setattr__(self, "reductions", (1,) * (len(self.kinds) + 2))
        for name, value, allowed in (
            ("weight_grad", self.weight_grad, WEIGHT_GRADS),
            ("grad_reduce", self.grad_reduce, GRAD_REDUCES),
            ("param_gather", self.param_gather, PARAM_GATHERS),
            *(("kinds", kind, KINDS) for kind in self.kinds or ("",)),
        ):
            if value not in allowed:
                raise ScheduleError(f"{name} has {value!r}: use {' or '.join(allowed)}")
        for name, parts in (("forward", self.forward), ("backward", self.backward)):
            if parts.microbatches < 1 or parts.chunks < 1 or parts.chunks % parts.microbatches:
                raise ScheduleError(
                    f"{name}: {parts.chunks} chunks cannot be shared by {parts.microbatches} microbatches: "
                    "use a multiple, at least 1"
                )
        if self.forward.microbatches % self.backward.microbatches:
            raise ScheduleError(
                f"backward: {self.backward.microbatches} microbatches cannot be made of the forward pass's "
                f"{self.forward.microbatches}: use a divisor"
            )
        if len(self.reductions) != len(self.kinds) + 2 or min(self.reductions) < 0:
            raise ScheduleError(
                f"reductions={self.reductions} must be {len(self.kinds) + 2} counts of at least 0: "
                f"embed, {len(self.kinds)} blocks, head"
            )

    @cached_property
    def unreduced(self) -> "StepShape":
        """The same shape without reductions."""
        return replace(self, reductions=(0,) * len(self.reductions))

    @cached_property
    def stages(self) -> tuple[ChainStage, ...]:
        """The stages of the forward chain.

        The rows of a block are unpermuted at the start of the next compute stage after its combine.
        """
        inner = ("gather", "expert", "scatter") if self.sharded_experts else ("expert",)
        ops = {"dense": ("attend",), "moe": ("attend", "dispatch", *inner, "combine")}
        blocks = (ChainStage(op, block) for block, kind in enumerate(self.kinds) for op in ops[kind])
        return (ChainStage("embed", NO_BLOCK), *blocks, ChainStage("head", NO_BLOCK))

    @cached_property
    def place(self) -> dict[ChainStage, int]:
        """The index of each stage in `stages`."""
        return {stage: i for i, stage in enumerate(self.stages)}

    @property
    def split_weight_grad(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return self.weight_grad != "inline"

    def num_parts(self, direction: str, op: str) -> int:
        """The number of parts that a stage is split into."""
        parts = self.forward if direction == "F" else self.backward
        return parts.microbatches if op in _PER_MICROBATCH else parts.chunks

    def tasks_of(self, direction: str, stage: ChainStage) -> list[Action]:
        """All parts of a stage, in order."""
        return [Action(direction, *stage, part) for part in range(self.num_parts(direction, stage.op))]

    def overlapping(self, direction: str, stage: ChainStage, action: Action) -> set[Action]:
        """The parts of a stage that share tokens (or slots) with an action of the chain."""
        own, other = self.num_parts(action.direction, action.op), self.num_parts(direction, stage.op)
        first, last = action.part * other // own, ((action.part + 1) * other - 1) // own
        return {Action(direction, *stage, part) for part in range(first, last + 1)}

    def gradients(self, owner: int) -> list[Action]:
        """The tasks that complete the gradients of an owner (0 is the embedding, 1 block 0, the last the head)."""
        head = self.stages[-1]
        direction = "W" if self.split_weight_grad else "B"
        if owner == len(self.kinds) + 1:
            of_norm = [ChainStage("attend", len(self.kinds) - 1)] if self.mtp else []
            return [task for stage in (head, *of_norm) for task in self.tasks_of(direction, stage)]
        if owner == 0:  # the embedding has no input gradient: B.embed is its weight gradient
            return self.tasks_of("B", self.stages[0]) + (self.tasks_of(direction, head) if self.tied else [])
        stages = [stage for stage in self.stages if stage.block == owner - 1 and stage.op in _WITH_WEIGHTS]
        return [task for stage in stages for task in self.tasks_of(direction, stage)]

    def reduced_gradients(self, owner: int) -> list[Action]:
        """The tasks that an owner's reductions wait for."""
        return [task for task in self.gradients(owner) if not (self.local_experts and task.op == "expert")]

    @cached_property
    def param_gathers(self) -> tuple[Action, ...]:
        """The gathers of parameters, in the order in which the passes need them."""
        if self.param_gather == "none":
            return ()
        gathers_experts = {"moe"} if not self.local_experts else set()
        ops = {b: ("attend", "expert") if kind in gathers_experts else ("attend",) for b, kind in enumerate(self.kinds)}
        forward = [Action("P", op, block, 0) for block in ops for op in ops[block]]
        again = [Action("P", op, block, 1) for block in reversed(range(len(ops) - 1)) for op in reversed(ops[block])]
        return (Action("P", "embed", NO_BLOCK, 0), *forward, Action("P", "head", NO_BLOCK, 0), *again)

    def param_gather_of(self, action: Action) -> Action | None:
        """The gather of the parameters that a forward or backward task computes with, or None."""
        if self.param_gather == "none" or action.op not in _WITH_PARAMETERS or action.direction not in ("F", "B"):
            return None
        if self.local_experts and action.op == "expert":
            return None
        if action.direction == "F":
            return Action("P", action.op, action.block, 0)
        return Action("P", action.op, action.block, 1) if 0 <= action.block < len(self.kinds) - 1 else None

    def reductions_of(self, owner: int) -> tuple[Action, ...]:
        """The reductions of an owner's gradients, one for each bucket."""
        op = "embed" if owner == 0 else "head" if owner == len(self.kinds) + 1 else "reduce"
        block = owner - 1 if op == "reduce" else NO_BLOCK
        return _buckets(op, block, self.reductions[owner])


@lru_cache(maxsize=1024)
def _buckets(op: str, block: int, count: int) -> tuple[Action, ...]:
    return tuple(Action("G", op, block, part) for part in range(count))


def weight_gradient(action: Action, shape: StepShape) -> Action | None:
    """The W task of a B task, or None."""
    split = shape.split_weight_grad and action.direction == "B" and action.op in _WITH_WEIGHTS
    return action._replace(direction="W") if split else None


def is_compute(stage: ChainStage) -> bool:
    """Whether a stage computes rather than communicates."""
    return stream_of_op(stage.op) == Stream.COMPUTE
