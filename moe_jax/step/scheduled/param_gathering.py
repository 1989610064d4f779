"""Gather parameters that devices have shards of, task by task (`optimizer.zero=3`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from moe_jax.config import Config
from moe_jax.config.registry import REDUCTION_FACTS
from moe_jax.parallel import background
from moe_jax.parallel.gathered_params import ParamGather, flat_shards, from_flat, gather_flat, gathered_together
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ranks_of
from moe_jax.schedule.actions import Action
from moe_jax.schedule.shape import ChainStage, StepShape
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.scan_residuals import ScanBody

Owner = int | str  # a block's number, or "embed" or "head"


@partial(jax.tree_util.register_dataclass, data_fields=["stacked"], meta_fields=["body"])
@dataclass(frozen=True)
class Regathered:
    """The pullback of a task without its weights, which are gathered or sent again for the backward pass."""

    body: ScanBody
    stacked: Sequence[jax.Array]  # what it saved besides

    def __call__(self, weights: Tree) -> Callable[..., Tree]:
        """Return the pullback."""
        pullback: Callable[..., Tree] = self.body.rebuild(weights, self.stacked)
        return pullback


def differentiate_regathered(
    pull: Callable[[Tree, Tree], tuple[Tree, Callable[..., Tree]]], weights: Tree, inputs: Tree
) -> tuple[Tree, Regathered]:
    """Return the result of `pull(weights, inputs)`, and its pullback without anything that only depends on weights."""

    def saving(inputs: Tree, weights: Tree) -> tuple[Tree, Tree, Tree]:
        result, pullback = pull(weights, inputs)
        return result, (), pullback

    body = ScanBody(saving, inputs, weights)
    result, _, stacked = body(inputs, weights)
    return result, Regathered(body, stacked)


Arrive = Callable[[], list[jax.Array]]


class ParamGathering:
    """Gathers weights of blocks, and of the embedding and the head, and puts them into `whole`.

    Where sums of gradients run in the background of a CPU cluster, so do gathers: a task starts them, and `arrive`
    waits for them.
    """

    def __init__(
        self,
        gathers: Mapping[Any, Tree],
        shards: Mapping[Any, Tree],
        whole: dict[Any, Tree],
        config: Config,
        first: jax.Array | None = None,
    ):
        """`gathers` and `shards` have a `ParamGather` and this device's shard of each parameter, by owner.

        Gathers in the background start after `first`. In a loop over parts of a batch it is of this part: shards are
        the same for all parts, and XLA would start a gather once, before the loop, of which each part awaits the end.
        """
        self._gathers, self._shards, self.whole = gathers, shards, whole
        in_background = REDUCTION_FACTS.of(config.exchange.reduction).in_background
        self._started = partial(_started_in_background, first=first) if in_background else _gathered
        self._in_flight: dict[tuple[Owner, bool], Callable[[], Tree]] = {}  # by owner, and whether it has its experts
        self._done: set[Action] = set()  # F tasks that computed with weights

    def run(self, action: Action, order: IssueOrder) -> None:
        """Run a P task, in the order of the schedule's collectives."""
        owner: Owner = action.op if action.op in ("embed", "head") else action.block
        of_experts = action.op == "expert"
        gathers, shards = (
            tree["moe"]["experts"] if of_experts else but_experts(tree)
            for tree in (self._gathers[owner], self._shards[owner])
        )
        self._in_flight[owner, of_experts] = _start(gathers, shards, partial(self._started, order=order))

    def arrive(self, owner: Owner, *, of_experts: Iterable[bool] = (False, True)) -> None:
        """Put the weights of an owner, or only its experts or all others, into `whole` if their gather has started."""
        for experts in of_experts:
            arrived = self._in_flight.pop((owner, experts), None)
            if arrived is not None:
                self._put(owner, experts, arrived())

    def release(self, action: Action, shape: StepShape) -> None:
        """Remove what has been gathered of a block after its last F task, if it is gathered again for its B tasks: what
        reads it in between would keep it in memory.
        """
        if action.op not in ("attend", "expert") or shape.param_gather_of(action._replace(direction="B")) is None:
            return
        self._done.add(action)
        has_experts = shape.kinds[action.block] == "moe"
        last = ChainStage("expert" if has_experts and not shape.local_experts else "attend", action.block)
        if self._done.issuperset(shape.tasks_of("F", last)):
            weights = self.whole.pop(action.block)
            if has_experts and shape.local_experts:
                self.whole[action.block] = only_experts(weights)

    def _put(self, owner: Owner, experts: bool, gathered: Tree) -> None:
        if not experts:
            self.whole[owner] = with_experts(gathered, self.whole.get(owner))
            return
        block = self.whole.get(owner, {"moe": {}})
        self.whole[owner] = block | {"moe": block["moe"] | {"experts": gathered}}


def _start(gathers: Tree, shards: Tree, started: Callable[..., Arrive]) -> Callable[[], Tree]:
    """Start the gathers of a tree's arrays, one after another. Returns the function that waits for all of them."""
    leaves, structure = jax.tree.flatten(shards)
    of_leaves: list[ParamGather] = jax.tree.leaves(gathers)
    together = gathered_together(of_leaves, leaves)
    arrivals = [
        started([of_leaves[number] for number in numbers], [leaves[number] for number in numbers])
        for numbers in together
    ]

    def arrived() -> Tree:
        for numbers, arrive in zip(together, arrivals, strict=True):
            for number, array in zip(numbers, arrive(), strict=True):
                leaves[number] = array
        return jax.tree.unflatten(structure, leaves)

    return arrived


def _gathered(gathers: Sequence[ParamGather], shards: Sequence[jax.Array], order: IssueOrder) -> Arrive:
    shapes = [shard.shape for shard in shards]
    if len(gathers) == 1:
        own = gathers[0]
        sent = own.sent_spec.all_gather(own.cast(order.after_gather(shards[0])), own.platform)
        whole = [own.restored(sent, shapes[0])]
    else:
        sent = gather_flat(gathers, order.after_gather(flat_shards(gathers, shards)))
        whole = from_flat(gathers, sent, shapes)
    # outside of loops nothing waits until arrays have their own types and shapes
    order.record_gather(whole[0] if order.uses_network else sent)
    return lambda: whole


def _started_in_background(
    gathers: Sequence[ParamGather], shards: Sequence[jax.Array], order: IssueOrder, first: jax.Array | None
) -> Arrive:
    axes, shapes = gathers[0].shard_spec.axes, [shard.shape for shard in shards]
    flat_n = order.after(flat_shards(gathers, shards), first)
    handle = background.start(order.after_comm(flat_n, only_starts=True), "gather", axes)
    order.record_comm(handle, only_starts=True)
    result = jax.ShapeDtypeStruct((ranks_of(axes) * flat_n.size,), flat_n.dtype)
    return lambda: from_flat(gathers, background.finish(order.after_compute(handle), result), shapes)


def but_experts(tree: Tree) -> Tree:
    """Return a tree like a block's parameters without the routed experts."""
    if not isinstance(tree, dict) or "moe" not in tree:
        return tree
    return tree | {"moe": {name: value for name, value in tree["moe"].items() if name != "experts"}}


def only_experts(tree: Tree) -> Tree:
    """Return a tree like a block's parameters with nothing but the routed experts."""
    return {"moe": {"experts": tree["moe"]["experts"]}}


def with_experts(rest: Tree, other: Tree | None) -> Tree:
    """Return a block's weights with the experts of `other`, if it has some."""
    if other is None or "moe" not in other or "experts" not in other["moe"]:
        return rest
    return rest | {"moe": rest["moe"] | {"experts": other["moe"]["experts"]}}
