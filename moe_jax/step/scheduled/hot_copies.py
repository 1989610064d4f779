"""Copies of a step's most loaded experts, in the order of a schedule (`exchange.hot_experts`).

The loads of a block's first microbatch decide which experts are copied for all of its microbatches: one choice, and one
sending of weights. Weights are sent after the first dispatch, so that they travel while the next microbatch's attention
computes. Rows of copies are computed with the last rows that a microbatch has sent. With `schedule.remat` the weights
are not stored for the backward pass, but sent again after its first exchange. The gradients of copies are summed after
the last exchange of a block's backward pass, or after its last W task, and their owners add them to their own.

Microbatches have index r.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.tree_util import Partial

from moe_jax.models.dispatchers.hot import HotRows
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.hot_experts import hottest, run_copies
from moe_jax.models.moe import RouterContext
from moe_jax.parallel.expert_copies import add_to_owners, parts_of_copies
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.reductions import REDUCTIONS, StartedSum, sum_in_shape
from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.pullbacks import Pullbacks, TaskKey
from moe_jax.step.scheduled.step_dims import StepDims

_COPIES, _OWNERS = "copies", "owners"  # ops of pullbacks
Pass = Literal["F", "B"]


@dataclass
class _BlockCopies:
    """The copies of one block's experts: their weights, and their gradients."""

    sent: dict[Pass, Any] = field(default_factory=dict)  # weights in flight for each pass: a tree of sums
    weights: dict[Pass, Tree] = field(default_factory=dict)  # those that have arrived
    num_done: int = 0  # microbatches whose gradients are complete
    gradient_sums: Any = None  # in flight: a tree of sums


class HotCopies:
    """The copies of a step's blocks, and what their rows have become. Without copies, its methods do nothing.

    `weights` are those of blocks by number, as far as they are here.
    """

    def __init__(self, dims: StepDims, pullbacks: Pullbacks, weights: dict[int, Tree]):
        self._dims, self._pullbacks, self._weights = dims, pullbacks, weights
        self._num_copies = dims.compute.hot_experts
        self._sends_again = dims.compute.remat != "none"  # whether copies are sent again for the backward pass
        self._blocks: defaultdict[int, _BlockCopies] = defaultdict(_BlockCopies)
        # by microbatch: its rows for copies, what copies return for them, and the cotangents of both
        self._rows: dict[int, ExpertRows] = {}
        self.returned: dict[int, jax.Array] = {}
        self.d_returned: dict[int, jax.Array] = {}
        self._d_rows: dict[int, jax.Array] = {}

    def _position_K(self, block: int) -> jax.Array | None:
        """Return the positions of a block's copied experts; None if they are not chosen, or not needed any more."""
        kept = self._pullbacks.stored.get((_OWNERS, block, 0))
        return None if kept is None else kept()

    def _microbatch(self, p: int) -> int | None:
        """Return the microbatch whose last piece is p; None for other pieces, and without copies."""
        return self._dims.microbatch_ended_by(p) if self._num_copies else None

    # forward

    def context(self, context: RouterContext, block: int, order: IssueOrder) -> RouterContext:
        """Return the context of a router that leaves out rows of copies."""
        if not self._num_copies:
            return context
        position_K = self._position_K(block)
        if position_K is not None:
            return context._replace(choose_hot=lambda _: position_K)
        # other compilers order the collectives of a program
        on_cpu = self._dims.compute.platform == "cpu"

        def choose(count_S: jax.Array) -> jax.Array:
            count_S = order.after_comm(count_S) if on_cpu else count_S
            return hottest(count_S, self._num_copies, self._dims.compute.expert_axis)

        return context._replace(choose_hot=choose)

    def take(self, block: int, r: int, hot: HotRows | None, order: IssueOrder) -> None:
        """Take the rows for copies that a router has left out."""
        if hot is None:
            return
        self._rows[r] = hot.rows
        if self._position_K(block) is not None:
            return
        self._pullbacks.stored[_OWNERS, block, 0] = Partial(_positions, hot.position_K)
        if self._dims.compute.platform == "cpu":
            order.record_comm(hot.position_K)

    def send(self, direction: Pass, block: int, order: IssueOrder) -> None:
        """Send the weights of a block's copies for a pass, once they are here and its copies are chosen."""
        position_K = self._position_K(block) if direction == "F" or self._sends_again else None
        experts = self._weights.get(block, {}).get("moe", {}).get("experts")
        if position_K is None or experts is None or direction in self._blocks[block].sent:
            return
        with jax.named_scope("copy_hot_experts"):
            parts = parts_of_copies(experts, position_K, self._dims.compute.expert_axis, self._dims.compute.dtype)
            self._blocks[block].sent[direction] = self._start_sums(parts, order)

    def _weights_of_copies(self, direction: Pass, block: int, order: IssueOrder) -> Tree:
        """Wait for the weights of a block's copies, which are sent here unless that was possible earlier."""
        self.send(direction, block, order)
        copies = self._blocks[block]
        if direction not in copies.weights:
            copies.weights[direction] = self._finish_sums(copies.sent[direction], order)
        return copies.weights[direction]

    def compute(self, block: int, p: int, returned: jax.Array, order: IssueOrder) -> None:
        """Compute the rows for copies of the microbatch whose last piece is p; `returned` are the piece's outputs."""
        r = self._microbatch(p)
        if r is None:
            return
        copies = self._weights_of_copies("F", block, order)
        moe, at_once = self._dims.config.model.moe, returned.shape[0] * returned.shape[1]
        local = len(jax.tree.leaves(self._weights[block]["moe"]["experts"])[0])
        run = run_copies(moe, self._dims.compute.product, at_once, local)
        rows = self._rows.pop(r)
        rows = rows._replace(rows=order.after_compute(rows.rows))
        pullbacks = self._pullbacks
        differentiate = pullbacks.differentiate_sent_again if self._sends_again else pullbacks.differentiate
        self.returned[r] = differentiate((_COPIES, block, r), run, copies, rows)
        order.record_compute(self.returned[r])

    # backward

    def backward(self, block: int, p: int, order: IssueOrder) -> None:
        """Compute the cotangents of the rows that `compute` did with this piece."""
        r = self._microbatch(p)
        if r is None:
            return
        cotangent = order.after_compute(self.d_returned.pop(r))
        if self._sends_again:
            self._pullbacks.give_weights((_COPIES, block, r), self._weights_of_copies("B", block, order))
        (self._d_rows[r],) = self._pullbacks.pull((_COPIES, block, r), [cotangent])
        order.record_compute(self._d_rows[r])
        if not self._dims.shape.split_weight_grad:
            self._blocks[block].num_done += 1

    def d_rows(self, r: int) -> list[jax.Array]:
        """Return the cotangents of the rows of a microbatch for copies."""
        return [self._d_rows.pop(r)] if self._num_copies else []

    def weights(self, block: int, p: int, order: IssueOrder) -> None:
        """Compute the weight gradients of the rows that `compute` did with this piece."""
        r = self._microbatch(p)
        if r is None:
            return
        gradient = self._pullbacks.waiting.pop((_COPIES, block, r)).weights(order.after_compute)
        order.record_compute(*jax.tree.leaves(gradient))
        self._pullbacks.add((_COPIES, block), gradient)
        self._blocks[block].num_done += 1

    def positions(self) -> dict[TaskKey, Any]:
        """What W tasks in another trace need besides their pullbacks: entries of `Pullbacks.stored`."""
        return {key: kept for key, kept in self._pullbacks.stored.items() if key[0] == _OWNERS}

    def sum(self, block: int, order: IssueOrder) -> None:
        """Sum the gradients of a block's copies over their ranks, as soon as those of all microbatches exist."""
        copies = self._blocks[block]
        if copies.num_done == self._dims.microbatches and copies.gradient_sums is None:
            with jax.named_scope("sum_hot_experts"):
                copies.gradient_sums = self._start_sums(self._pullbacks.grads.pop((_COPIES, block)), order)

    def add_to_owners(self, block: int, experts: Tree, order: IssueOrder) -> Tree:
        """Return the gradients of a block's experts with those of their copies, once all of them exist."""
        self.sum(block, order)
        if self._blocks[block].gradient_sums is None:
            return experts
        summed = self._finish_sums(self._blocks.pop(block).gradient_sums, order)
        position_K = self._pullbacks.stored.pop((_OWNERS, block, 0))()
        total = add_to_owners(experts, summed, position_K, self._dims.compute.expert_axis)
        self._pullbacks.grads["expert", block] = total
        return total

    def _start_sums(self, tree: Tree, order: IssueOrder) -> Any:
        """Start the sums of a tree's arrays over the ranks of experts, one after another: a tree of `StartedSum`."""
        name, axis = self._dims.config.exchange.reduction, self._dims.compute.expert_axis
        # other ways to sum are for large arrays
        impl = sum_in_shape(name if REDUCTIONS[name].only_starts else "all_reduce")

        def start(x: jax.Array) -> StartedSum:
            in_flight = impl.start(order.after_comm(x, impl.only_starts), (axis,) if isinstance(axis, Axis) else axis)
            order.record_comm(in_flight[-1], impl.only_starts)
            return StartedSum(impl, in_flight)

        return jax.tree.map(start, tree)

    def _finish_sums(self, sums: Any, order: IssueOrder) -> Tree:
        return jax.tree.map(
            lambda each: each.arrive(order.arrived_late), sums, is_leaf=lambda each: isinstance(each, StartedSum)
        )


def _positions(position_K: jax.Array) -> jax.Array:
    """Kept like a pullback, for the backward pass of another iteration."""
    return position_K
