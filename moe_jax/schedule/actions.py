"""The tasks of a training step, by name.

`F.attend.3.0` is direction F, op attend, block 3, microbatch 0. The last number is the *part*: the microbatch, the
capacity chunk of an expert pipeline, the bucket of a reduction, or the pass that parameters are gathered for (0
forward, 1 backward). Ops that belong to no block have no block number: `F.head.1`.

| direction | ops |
|---|---|
| F forward, B backward | embed, attend, dispatch, gather, expert, scatter, combine, head |
| W weight gradients, where they are split from B | attend, expert, head |
| P gathers of parameters that are sharded | embed, attend (a block's, except experts), expert, head |
| G sums over devices | reduce (a block's gradients), embed, head (theirs), counts (all routers' counts) |
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from moe_jax.errors import UserError

NO_BLOCK = -1
_BLOCKLESS = ("embed", "head", "counts")
_CHAIN = ("embed", "attend", "dispatch", "gather", "expert", "scatter", "combine", "head")
_OPS = {
    "F": _CHAIN,
    "B": _CHAIN,
    "W": ("attend", "expert", "head"),
    "P": ("embed", "attend", "expert", "head"),
    "G": ("reduce", "embed", "head", "counts"),
}
_FORM = re.compile(r"([FBWPG])\.([a-z]+)(?:\.(\d+))?\.(\d+)", re.ASCII)


class ScheduleError(UserError):
    """A schedule that cannot run, or whose text cannot be read."""


class Action(NamedTuple):
    """One task of a step. Actions can be sorted, hashed and printed."""

    direction: str  # F, B, W, P or G
    op: str
    block: int  # NO_BLOCK for embed, head and counts
    part: int

    def __str__(self) -> str:
        block = "" if self.block == NO_BLOCK else f".{self.block}"
        return f"{self.direction}.{self.op}{block}.{self.part}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the name of a task. Raises ScheduleError for an invalid name."""
        form = _FORM.fullmatch(text)
        if not form:
            raise ScheduleError(f"{text!r} is not a task: write it like F.attend.3.0, or F.head.0 without a block")
        direction, op, block, part = form.groups()
        if op not in _OPS[direction]:
            raise ScheduleError(f"{text!r} has an unknown op: {direction} has {', '.join(_OPS[direction])}")
        if (block is None) != (op in _BLOCKLESS):
            form_of_op = f"{direction}.{op}.0" if op in _BLOCKLESS else f"{direction}.{op}.3.0"
            raise ScheduleError(f"{text!r} has {'no' if block is None else 'a'} block number: write {form_of_op}")
        return cls(direction, op, NO_BLOCK if block is None else int(block), int(part))


class Stream(StrEnum):
    """A queue that runs one task at a time, concurrently with the other streams."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"  # between nodes, where there are three streams
    INTRA_NODE = "intra-node"


_STREAM = dict.fromkeys(("embed", "attend", "expert", "head"), Stream.COMPUTE)
_STREAM |= dict.fromkeys(("dispatch", "combine"), Stream.COMMUNICATION)
_STREAM |= dict.fromkeys(("gather", "scatter"), Stream.INTRA_NODE)

StreamOf = Callable[[Action], Stream]
Seconds = Callable[[Action], float]  # the duration of a task


def stream_of_op(op: str) -> Stream:
    """The stream of a forward or backward op."""
    return _STREAM[op]


def three_streams(action: Action) -> Stream:
    """Assign a task to compute, inter-node or intra-node communication.

    For clusters where the collectives of sharded experts have links of their own.
    """
    return Stream.COMMUNICATION if action.direction in ("P", "G") else _STREAM[action.op]


def two_streams(action: Action) -> Stream:
    """Assign a task to compute or communication, for clusters where all collectives share one link."""
    return Stream.COMPUTE if three_streams(action) == Stream.COMPUTE else Stream.COMMUNICATION


def by_reach(action: Action) -> Stream:
    """Assign a task to compute, to links inside a node (rows), or to those between nodes (gathers of parameters and
    sums). For clusters of several nodes that have all ranks of an expert group each.
    """
    return Stream.INTRA_NODE if is_transfer(action) else two_streams(action)


def is_transfer(action: Action) -> bool:
    """Whether a task moves rows between devices."""
    return action.direction in ("F", "B") and _STREAM[action.op] != Stream.COMPUTE


def is_reduction(action: Action) -> bool:
    """Whether a task sums gradients over devices."""
    return action.direction == "G" and action.op != "counts"


def is_param_gather(action: Action) -> bool:
    """Whether a task gathers parameters from the devices that have shards of them."""
    return action.direction == "P"
