"""When the parameters of blocks are gathered, if devices have shards of them (`optimizer.zero=3`).

A block's parameters are gathered once for its forward tasks and once for its backward tasks. The highest block keeps
them: its backward tasks follow its forward tasks. A gather waits for a compute task, which bounds the memory of
gathered parameters: with "block" it starts when the block before, in the order of compute tasks, has computed; with
"prefetch" when that block starts. In loops see `scanned.py`.
"""

from collections.abc import Iterable

from moe_jax.schedule.actions import Action
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.shape import StepShape

_AHEAD = {"block": 0, "prefetch": 1}  # blocks


def needs_with_release(shape: StepShape, compute: Iterable[Action]) -> Needs:
    """The task graph of a shape, in which gathers also wait until a device has memory for them.

    `compute` are the compute tasks in order, or those of some blocks; other blocks' gathers wait for nothing else.
    """
    needs, waits = task_graph(shape), releases(shape, compute)
    return {**needs, **{gather: needs[gather] | {task} for gather, task in waits.items()}} if waits else needs


def releases(shape: StepShape, compute: Iterable[Action]) -> dict[Action, Action]:
    """The compute task after which a device has memory for a gather, by gather. The first ones wait for none.

    `compute` are the compute tasks in order, or those of some blocks.
    """
    if shape.param_gather == "none":
        return {}
    starts: dict[tuple[int, int], int] = {}  # by block and pass: where the compute task before the first one stands
    ends: dict[tuple[int, int], int] = {}  # where the last one does
    tasks = list(compute)
    for place, task in enumerate(tasks):
        gather = shape.param_gather_of(task)
        if gather is not None:
            starts.setdefault(_use(gather), place - 1)
            ends[_use(gather)] = place
    order = list(starts)
    release = dict(zip(order[_AHEAD[shape.param_gather] :], starts.values(), strict=False))
    # a block is not gathered again while its forward tasks have it
    waits = {
        gather: max(release.get(_use(gather), -1), ends.get((gather.block, 0), -1) if gather.part else -1)
        for gather in shape.param_gathers
    }
    return {gather: tasks[place] for gather, place in waits.items() if place >= 0}


def _use(gather: Action) -> tuple[int, int]:
    """The block and the pass that a gather is for; embedding and head are like blocks."""
    return {"embed": -1, "head": -2}.get(gather.op, gather.block), gather.part
