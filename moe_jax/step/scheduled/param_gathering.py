"""Gather parameters that devices have shards of, task by task (`optimizer.zero=3`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from moe_jax.parallel.gathered_params import ParamGather, flat_shards, gather_flat, gathered_together
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.scan_residuals import ScanBody

Owner = int | str  # a block's number, or "embed" or "head"


class Regathered(NamedTuple):
    """The pullback of a task, which computes with weights that are gathered again for the backward pass."""

    body: ScanBody
    stacked: Sequence[jax.Array]  # what it saved besides

    def with_weights(self, weights: Tree) -> Callable[..., Tree]:
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


class ParamGathering:
    """Gathers weights of blocks, and of the embedding and the head, and puts them into `whole`."""

    def __init__(self, gathers: Mapping[Any, Tree], shards: Mapping[Any, Tree], whole: dict[Any, Tree]):
        """`gathers` and `shards` have a `ParamGather` and this device's shard of each parameter, by owner."""
        self._gathers, self._shards, self.whole = gathers, shards, whole

    def run(self, action: Action, order: IssueOrder) -> None:
        """Run a P task, in the order of the schedule's collectives."""
        owner: Owner = action.op if action.op in ("embed", "head") else action.block
        gathers, shards = self._gathers[owner], self._shards[owner]
        if action.op != "expert":
            gathered = _gathered(but_experts(gathers), but_experts(shards), order)
            self.whole[owner] = _joined(gathered, self.whole.get(owner))
            return
        experts = _gathered(gathers["moe"]["experts"], shards["moe"]["experts"], order)
        block = self.whole.get(owner, {"moe": {}})
        self.whole[owner] = block | {"moe": block["moe"] | {"experts": experts}}


def _gathered(gathers: Tree, shards: Tree, order: IssueOrder) -> Tree:
    """Return whole arrays. Their gathers follow each other."""
    leaves, structure = jax.tree.flatten(shards)
    of_leaves: list[ParamGather] = jax.tree.leaves(gathers)
    for numbers in gathered_together(of_leaves, leaves):
        own, parts = [of_leaves[number] for number in numbers], [leaves[number] for number in numbers]
        if len(numbers) == 1:
            whole = [own[0].gather(order.after_comm(parts[0]))]
        else:
            whole = gather_flat(own, order.after_comm(flat_shards(own, parts)), [part.shape for part in parts])
        order.record_comm(whole[0])
        for number, array in zip(numbers, whole, strict=True):
            leaves[number] = array
    return jax.tree.unflatten(structure, leaves)


def but_experts(tree: Tree) -> Tree:
    """Return a tree like a block's parameters without the routed experts."""
    if not isinstance(tree, dict) or "moe" not in tree:
        return tree
    return tree | {"moe": {name: value for name, value in tree["moe"].items() if name != "experts"}}


def _joined(rest: Tree, before: Tree | None) -> Tree:
    """Return a block's weights with the experts that have been gathered before."""
    if before is None or "moe" not in before or "experts" not in before["moe"]:
        return rest
    return rest | {"moe": rest["moe"] | {"experts": before["moe"]["experts"]}}
