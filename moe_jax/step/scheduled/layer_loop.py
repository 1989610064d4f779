"""Run equal groups of blocks in a loop: `lax.scan` runs a schedule's tasks in every iteration, forward and backward.

A forward iteration passes on the residual stream, with the last block's combine added, and stacks the residuals of its
pullbacks. A backward iteration rebuilds its pullbacks, runs its tasks, and sums the gradients of the iteration above
it. The weights of iterations are in `layer_loop_weights.py`, and their gradients in `layer_loop_grads.py`.

Blocks inside a scan have the numbers of iteration 0. L blocks of an iteration, H heads, M blocks with experts, E
experts.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.layer_layout import Segment
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.moe import RouterStats
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import Action, is_reduction
from moe_jax.schedule.scanned import ScannedSchedule
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop_grads import GradientArrays, LoopGradients, StackLayout
from moe_jax.step.scheduled.layer_loop_weights import ABOVE, BELOW, ScanWeights, Weights
from moe_jax.step.scheduled.saved_values import SavedValues
from moe_jax.step.scheduled.scan_residuals import BlockConsts, ScanBody


def run(actions: Iterable[Action], tasks: Tasks, sums: GradientReducer, above: int = 0) -> None:
    """Issue tasks in order. Their scopes have the names of blocks so many places `above`."""
    runs = {"F": tasks.forward, "B": tasks.backward, "W": tasks.weights, "P": tasks.gather_params, "G": sums.run}
    for action in actions:
        with jax.named_scope(str(action._replace(block=action.block + above))):
            runs[action.direction](action)


class Stacked(NamedTuple):
    """Arrays from which each scan iteration takes its share. The first four belong to the scanned segment, by place in
    its period.
    """

    params: Tree  # this device's shards with `optimizer.zero=3`
    gathers: Tree  # how those of one block are gathered, and their types in products
    shard_specs: Tree  # how its parameters are sharded by ZeRO
    earlier: Tree | None  # gradients that are added to those of the iterations
    router_inputs: RouterInputs | None  # what gates read besides features, before block 0
    slot_ME: jax.Array | None  # placement of all blocks' experts; None: experts in order
    document_BN: jax.Array | None  # the document of each token; None: all are of one


class _ForwardCarry(NamedTuple):
    x: list[jax.Array]  # residual stream of each microbatch
    gathered: Weights | None  # weights of the next iteration; None if devices store whole weights
    unsaved: list[jax.Array]  # saved values that are not in host memory yet


class _ForwardResults(NamedTuple):
    """What a forward iteration returns besides its carry and its saved values; the scan stacks it."""

    stats: list[RouterStats]  # of each block with experts, summed over microbatches
    max_logit_LH: jax.Array | None  # the largest attention logits; None: not asked for
    end: jax.Array | None  # see `IssueOrder.end_of_iteration`


class _BackwardCarry(NamedTuple):
    dx: list[jax.Array]  # cotangents of the residual stream of each microbatch
    gradients: GradientArrays
    gathered: Weights | None  # as in `_ForwardCarry`
    fetched: list[jax.Array]  # saved values of the next iteration that are back from host memory


class LayerScan:
    """The forward and backward scans of a step over a segment.

    `sums` and its tasks run everything outside the scans. Each iteration has `Tasks` and a `GradientReducer` of its
    own.
    """

    def __init__(self, scanned: ScannedSchedule, segment: Segment, sums: GradientReducer, stacked: Stacked):
        self.scanned, self.stacked = scanned, stacked
        self.sums, self.tasks, self.dims = sums, sums.tasks, sums.tasks.dims
        self.first, self.size, self.highest = scanned.blocks.first, scanned.blocks.size, scanned.blocks.count - 1
        self.layout = StackLayout(scanned.blocks, len(segment.kinds))
        self.weights = ScanWeights(stacked.params, stacked.gathers, self.layout, self.dims)
        self.microbatches = range(self.dims.microbatches)
        self.moe = [block for block in self.layout.blocks if self.dims.shape.kinds[block] == "moe"]
        self.reduces_above = any(map(is_reduction, scanned.backward_body))  # whether backward iterations do

    def _consts(self, iteration: int | jax.Array, x: jax.Array, gathered: Weights | None, neighbor: int) -> BlockConsts:
        """Return the constants of an iteration that begins with `x`, for which weights have been `gathered`, and which
        gathers those of its `neighbor`. With `gathered` None, devices store whole weights.
        """
        stacked = self.stacked
        weights = self.weights.of(iteration, x, gathered)
        shards = None if gathered is None else self.weights.shards(iteration, neighbor)
        placements = {}
        if stacked.slot_ME is not None:
            placements = {block: self._of_moe_block(stacked.slot_ME, iteration, block) for block in self.moe}
        router_inputs = stacked.router_inputs and stacked.router_inputs.above(iteration * self.size)
        return BlockConsts(weights, router_inputs, placements, stacked.document_BN, shards)

    def forward(self) -> None:
        """Run the forward scan over all iterations but the highest, whose tasks follow."""
        for r in self.microbatches:
            self.tasks.add_combine_to_residual(r, self.first)
        x = [self.tasks.x[r] for r in self.microbatches]
        gathered = self.weights.gathered_outside(self.tasks, 0)
        consts = jax.eval_shape(lambda: self._consts(0, x[0], gathered, ABOVE))
        self.body = ScanBody(self._forward_iteration, jax.eval_shape(lambda: x), consts)
        self.saved = SavedValues(self.body.stacked_shapes, self.dims.config.schedule.offload_activations)

        def step(carry: _ForwardCarry, iteration: jax.Array) -> tuple[_ForwardCarry, tuple[_ForwardResults, Any]]:
            consts = self._consts(iteration, carry.x[0], carry.gathered, ABOVE)
            x, (results, gathered), values = self.body(carry.x, consts)
            to_stack, unsaved = self.saved.store(values, carry.unsaved)
            return _ForwardCarry(x, gathered, unsaved), (results, to_stack)

        iterations = self.tasks.order.into_loop(jnp.arange(self.highest))
        begin = _ForwardCarry(x, gathered, self.saved.before_first())
        last, (results, self.saved.stacks) = jax.lax.scan(step, begin, iterations)
        self.saved.last = last.unsaved
        self.tasks.order.out_of_loop(results.end)
        self.tasks.x = dict(zip(self.microbatches, last.x, strict=True))
        self._keep_statistics(results)
        self.weights.pass_to(self.tasks, self.highest, last.gathered)

    def _forward_iteration(
        self, x: list[jax.Array], consts: BlockConsts
    ) -> tuple[list[jax.Array], tuple[_ForwardResults, Weights | None], Tree]:
        """Return the stream after an iteration, its results with the weights it has gathered, and what it saves."""
        gathering = self.weights.gathering(consts.shards, ABOVE)
        tasks = Tasks(self.dims, None, consts, gathering=gathering)
        tasks.x = dict(zip(self.microbatches, x, strict=True))
        run(self.scanned.forward_body, tasks, self.sums)
        for r in self.microbatches:
            tasks.add_combine_to_residual(r, self.first + self.size)
        self.tasks.widths = tasks.widths
        of_block = ([tasks.stats[block, r] for r in self.microbatches] for block in self.moe)
        stats = [jax.tree.map(lambda *parts: sum(parts), *parts) for parts in of_block]
        results = _ForwardResults(stats, tasks.max_logit_LH(), tasks.order.end_of_iteration())
        gathered = self.weights.arrived(gathering, ABOVE)
        saved = tasks.pullbacks.stored, tasks.lane_overflow.overflows
        return [tasks.x[r] for r in self.microbatches], (results, gathered), saved

    def _keep_statistics(self, stacked: _ForwardResults) -> None:
        """Keep the statistics of all iterations, with the blocks of an iteration next to each other."""
        if stacked.max_logit_LH is not None:
            heads = stacked.max_logit_LH.shape[-1]
            self.tasks.max_logits[self.first] = stacked.max_logit_LH.reshape(-1, heads)
        if self.moe:
            by_iteration = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *stacked.stats)
            self.sums.loop_stats[self.first] = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_iteration
            )

    def _restore(self, tasks: Tasks, values: list[jax.Array], consts: BlockConsts) -> None:
        """Restore the pullbacks of a forward iteration in `tasks` from its saved values."""
        pullbacks, overflows = self.body.rebuild(consts, values)
        tasks.pullbacks.stored |= pullbacks
        tasks.lane_overflow.overflows |= overflows
        tasks.widths = self.tasks.widths

    def backward(self) -> None:
        """Run the backward scan over all iterations but the highest and the lowest: the backward tasks of the highest
        have run, and those of the lowest follow.
        """
        self.gradients = LoopGradients(
            *(self.layout, self.stacked.shard_specs, self.stacked.params),
            waiting_iterations=self.scanned.blocks.count if self.scanned.reduction_body else 1,
            sharded=self.tasks.gathering is not None,
        )
        for block in self.layout.blocks:
            self.gradients.put(self.highest, block, self.sums.own(block + self.highest * self.size + 1))
        share_ME = self.sums.share_ME if self.moe else None  # computed outside the loop
        dx = [self.tasks.dx[r] for r in self.microbatches]
        iterations = self.tasks.order.into_loop(jnp.arange(1, self.highest))
        gathered = self.weights.gathered_outside(self.tasks, self.highest - 1)
        begin = _BackwardCarry(dx, self.gradients.arrays, gathered, self.saved.last)
        step = partial(self._backward_iteration, share_ME=share_ME)
        last, ends = jax.lax.scan(step, begin, iterations, reverse=True)
        self.gradients = self.gradients.with_arrays(last.gradients)
        self.tasks.order.out_of_loop(ends)
        self.tasks.dx = dict(zip(self.microbatches, last.dx, strict=True))
        self.weights.pass_to(self.tasks, 0, last.gathered)
        values = self.saved.values(0, last.fetched)
        self._restore(self.tasks, values, self._consts(0, last.dx[0], last.gathered, BELOW))
        for r in reversed(self.microbatches):
            self.tasks.add_combine_to_residual_back(r, self.first + self.size)
        if self.reduces_above:
            self._pass_gradients(self.gradients, 1, self.sums, self.size)

    def _backward_iteration(
        self, carry: _BackwardCarry, iteration: jax.Array, share_ME: jax.Array | None
    ) -> tuple[_BackwardCarry, jax.Array | None]:
        """Return the next carry, and the end of the iteration's collectives. `share_ME`: factors of all blocks."""
        consts = self._consts(iteration, carry.dx[0], carry.gathered, BELOW)
        gathering = self.weights.gathering(consts.shards, BELOW)
        tasks = Tasks(self.dims, None, BlockConsts(consts.blocks), gathering=gathering)
        self._restore(tasks, self.saved.values(iteration, carry.fetched), consts)
        fetched = self.saved.fetch(iteration - 1)
        gradients = self.gradients.with_arrays(carry.gradients)
        sums = GradientReducer(self.sums.reductions, tasks, self._earlier(iteration))
        if share_ME is not None:
            tasks.share = partial(self._of_moe_block, share_ME, iteration)
        tasks.dx = dict(zip(self.microbatches, carry.dx, strict=True))
        if self.reduces_above:
            self._pass_gradients(gradients, iteration + 1, sums, self.size)
        for r in reversed(self.microbatches):
            tasks.add_combine_to_residual_back(r, self.first + self.size)
        run(self.scanned.backward_body, tasks, sums, self.size)  # as the lowest iteration's
        if self.reduces_above:
            self._put_totals(gradients, iteration + 1, sums, self.size)
        for block in self.layout.blocks:
            gradients.put(iteration, block, sums.own(block + 1))
        dx = [tasks.dx[r] for r in self.microbatches]
        gathered = self.weights.arrived(gathering, BELOW)
        return _BackwardCarry(dx, gradients.arrays, gathered, fetched), tasks.order.end_of_iteration()

    def reduce(self) -> None:
        """Store the gradients of the lowest iteration, and run the reductions that follow the backward pass."""
        if not self.scanned.reduction_body:
            if self.reduces_above:
                self._put_totals(self.gradients, 1, self.sums, self.size)
            for block in self.layout.blocks:
                self.gradients.put_sum(0, block, self.sums.total(block + 1))
            return
        for block in self.layout.blocks:
            self.gradients.put(0, block, self.sums.own(block + 1))
        iterations = self.tasks.order.into_loop(jnp.arange(self.scanned.blocks.count))
        arrays, ends = jax.lax.scan(self._reduce_iteration, self.gradients.arrays, iterations, reverse=True)
        self.gradients = self.gradients.with_arrays(arrays)
        self.tasks.order.out_of_loop(ends)

    def _reduce_iteration(
        self, arrays: GradientArrays, iteration: jax.Array
    ) -> tuple[GradientArrays, jax.Array | None]:
        gradients = self.gradients.with_arrays(arrays)
        sums = GradientReducer(self.sums.reductions, Tasks(self.dims, None, BlockConsts({})), None)
        self._pass_gradients(gradients, iteration, sums)
        run(self.scanned.reduction_body, sums.tasks, sums)
        self._put_totals(gradients, iteration, sums)
        return gradients.arrays, sums.tasks.order.end_of_iteration()

    def _pass_gradients(
        self, gradients: LoopGradients, iteration: int | jax.Array, sums: GradientReducer, offset: int = 0
    ) -> None:
        """Pass the gradients of an iteration to `sums`, whose reductions have block numbers that are `offset` higher
        than those of iteration 0.
        """
        for block in self.layout.blocks:
            sums.loop_gradients[block + offset + 1] = gradients.take(iteration, block)

    def _put_totals(
        self, gradients: LoopGradients, iteration: int | jax.Array, sums: GradientReducer, offset: int = 0
    ) -> None:
        """Store the sums of what `_pass_gradients` has passed."""
        for block in self.layout.blocks:
            owner = block + offset + 1
            gradients.put_sum(iteration, block, sums.total(owner), sums.loop_gradients[owner])

    def _earlier(self, iteration: jax.Array) -> Callable[[int], Tree] | None:
        """Return what returns an owner's gradients of earlier accumulation steps; None if there are none."""
        if self.stacked.earlier is None:
            return None
        return lambda owner: self.layout.take(self.stacked.earlier, iteration, owner - 1)

    def _of_moe_block(self, of_all_M: jax.Array, iteration: int | jax.Array, block: int) -> jax.Array:
        """Return the entry of a block in an iteration, from an array over all blocks with experts."""
        below = self.dims.shape.kinds[: self.first].count("moe")
        place = below + iteration * len(self.moe) + self.moe.index(block)
        return jax.lax.dynamic_index_in_dim(of_all_M, place, keepdims=False)
