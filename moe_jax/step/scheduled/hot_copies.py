"""Copies of a step's most loaded experts, in the order of a schedule (`exchange.hot_experts`).

The loads of a block's first microbatch decide which experts are copied for all of its microbatches: one choice, and one
sending of weights. Weights are sent after the first dispatch, so that they travel while the next microbatch's attention
computes. Rows of copies are computed with the last rows that a microbatch has sent. With `schedule.remat` the weights
are not stored for the backward pass, but sent again after its first exchange. The gradients of copies are summed after
the last exchange of a block's backward pass, or after its last W task, and their owners add them to their own.

Microbatches have index r.
"""

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


class HotCopies:
    """The copies of a step's blocks, and what their rows have become. Without copies, its methods do nothing.

    `blocks` are weights by block number, as far as they are here.
    """

    def __init__(self, dims: StepDims, pullbacks: Pullbacks, blocks: dict[int, Tree]):
        self._dims, self._pullbacks, self._blocks = dims, pullbacks, blocks
        self._most = dims.compute.hot_experts
        self._again = dims.compute.remat != "none"  # whether copies are sent again for the backward pass
        self._position: dict[int, jax.Array] = {}  # of copied experts, by block
        self._sent: dict[tuple[Pass, int], Any] = {}  # copies that have been sent, by pass and block: a tree of sums
        self._arrived_copies: dict[tuple[Pass, int], Tree] = {}
        self._rows: dict[int, ExpertRows] = {}  # by microbatch: for copies
        self.returned: dict[int, jax.Array] = {}  # from copies
        self.d_returned: dict[int, jax.Array] = {}  # cotangents of `returned`
        self._d_rows: dict[int, jax.Array] = {}
        self._num_done: dict[int, int] = {}  # microbatches whose gradients are complete, by block
        self._sums: dict[int, Any] = {}  # of gradients, by block: a tree of sums

    # forward

    def context(self, context: RouterContext, block: int, order: IssueOrder) -> RouterContext:
        """Return the context of a router that leaves out rows of copies."""
        if not self._most:
            return context
        if block in self._position:
            return context._replace(choose_hot=lambda _: self._position[block])
        # other compilers order the collectives of a program
        on_cpu = self._dims.compute.platform == "cpu"

        def choose(count_S: jax.Array) -> jax.Array:
            count_S = order.after_comm(count_S) if on_cpu else count_S
            return hottest(count_S, self._most, self._dims.compute.expert_axis)

        return context._replace(choose_hot=choose)

    def take(self, block: int, r: int, hot: HotRows | None, order: IssueOrder) -> None:
        """Take the rows for copies that a router has left out."""
        if hot is None:
            return
        self._rows[r] = hot.rows
        if block in self._position:
            return
        self._position[block] = hot.position_K
        self._pullbacks.stored[_OWNERS, block, 0] = Partial(_positions, hot.position_K)
        if self._dims.compute.platform == "cpu":
            order.record_comm(hot.position_K)

    def send(self, of: Pass, block: int, order: IssueOrder) -> None:
        """Send the weights of a block's copies for a pass, once they are here and its copies are chosen."""
        chosen = self._pullbacks.stored.get((_OWNERS, block, 0)) if of == "F" or self._again else None
        experts = self._blocks.get(block, {}).get("moe", {}).get("experts")
        if chosen is None or (of, block) in self._sent or experts is None:
            return
        with jax.named_scope("copy_hot_experts"):
            parts = parts_of_copies(experts, chosen(), self._dims.compute.expert_axis, self._dims.compute.dtype)
            self._sent[of, block] = self._started(parts, order)

    def _copies(self, of: Pass, block: int, order: IssueOrder) -> Tree:
        self.send(of, block, order)  # unless that was possible earlier
        if (of, block) not in self._arrived_copies:
            self._arrived_copies[of, block] = self._arrived(self._sent[of, block], order)
        return self._arrived_copies[of, block]

    def compute(self, block: int, p: int, returned: jax.Array, order: IssueOrder) -> None:
        """Compute the rows for copies of the microbatch whose last piece is p; `returned` are the piece's outputs."""
        r = self._dims.microbatch_ended_by(p)
        if not self._most or r is None:
            return
        copies = self._copies("F", block, order)
        moe, at_once = self._dims.config.model.moe, returned.shape[0] * returned.shape[1]
        local = len(jax.tree.leaves(self._blocks[block]["moe"]["experts"])[0])
        run = run_copies(moe, self._dims.compute.product, at_once, local)
        rows = self._rows.pop(r)
        rows = rows._replace(rows=order.after_compute(rows.rows))
        pullbacks = self._pullbacks
        differentiate = pullbacks.differentiate_sent_again if self._again else pullbacks.differentiate
        self.returned[r] = differentiate((_COPIES, block, r), run, copies, rows)
        order.record_compute(self.returned[r])

    # backward

    def backward(self, block: int, p: int, order: IssueOrder) -> None:
        """Compute the cotangents of the rows that `compute` did with this piece."""
        r = self._dims.microbatch_ended_by(p)
        if not self._most or r is None:
            return
        cotangent = order.after_compute(self.d_returned.pop(r))
        if self._again:
            self._pullbacks.give_weights((_COPIES, block, r), self._copies("B", block, order))
        (self._d_rows[r],) = self._pullbacks.pull((_COPIES, block, r), [cotangent])
        order.record_compute(self._d_rows[r])
        if not self._dims.shape.split_weight_grad:
            self._num_done[block] = self._num_done.get(block, 0) + 1

    def d_rows(self, r: int) -> list[jax.Array]:
        """Return the cotangents of the rows of a microbatch for copies."""
        return [self._d_rows.pop(r)] if self._most else []

    def weights(self, block: int, p: int, order: IssueOrder) -> None:
        """Compute the weight gradients of the rows that `compute` did with this piece."""
        r = self._dims.microbatch_ended_by(p)
        if not self._most or r is None:
            return
        gradient = self._pullbacks.waiting.pop((_COPIES, block, r)).weights(order.after_compute)
        order.record_compute(*jax.tree.leaves(gradient))
        self._pullbacks.add((_COPIES, block), gradient)
        self._num_done[block] = self._num_done.get(block, 0) + 1

    def positions(self) -> dict[TaskKey, Any]:
        """What W tasks in another trace need besides their pullbacks: entries of `Pullbacks.stored`."""
        return {key: kept for key, kept in self._pullbacks.stored.items() if key[0] == _OWNERS}

    def sum(self, block: int, order: IssueOrder) -> None:
        """Sum the gradients of a block's copies over their ranks, as soon as those of all microbatches exist."""
        if self._num_done.get(block) != self._dims.microbatches or block in self._sums:
            return
        with jax.named_scope("sum_hot_experts"):
            self._sums[block] = self._started(self._pullbacks.grads.pop((_COPIES, block)), order)

    def add_to_owners(self, block: int, experts: Tree, order: IssueOrder) -> Tree:
        """Return the gradients of a block's experts with those of their copies, once all of them exist."""
        self.sum(block, order)
        if block not in self._sums:
            return experts
        del self._num_done[block]
        summed = self._arrived(self._sums.pop(block), order)
        position_K = self._pullbacks.stored.pop((_OWNERS, block, 0))()
        total = add_to_owners(experts, summed, position_K, self._dims.compute.expert_axis)
        self._pullbacks.grads["expert", block] = total
        return total

    def _started(self, tree: Tree, order: IssueOrder) -> Any:
        """Start the sums over the ranks of experts, one after another: a tree of them."""
        name, axis = self._dims.config.exchange.reduction, self._dims.compute.expert_axis
        # other ways to sum are for large arrays
        impl = sum_in_shape(name if REDUCTIONS[name].only_starts else "all_reduce")

        def start(x: jax.Array) -> StartedSum:
            in_flight = impl.start(order.after_comm(x, impl.only_starts), (axis,) if isinstance(axis, Axis) else axis)
            order.record_comm(in_flight[-1], impl.only_starts)
            return StartedSum(impl, in_flight)

        return jax.tree.map(start, tree)

    def _arrived(self, sums: Any, order: IssueOrder) -> Tree:
        return jax.tree.map(
            lambda each: each.arrive(order.arrived_late), sums, is_leaf=lambda each: isinstance(each, StartedSum)
        )


def _positions(position_K: jax.Array) -> jax.Array:
    """Kept like a pullback, for the backward pass of another iteration."""
    return position_K
