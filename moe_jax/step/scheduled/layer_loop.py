"""Run equal groups of blocks in a loop: `lax.scan` runs a schedule's tasks in every iteration, forward and backward.

A forward iteration passes on the residual stream, with the last block's combine added, and stacks the residuals of its
pullbacks. A backward iteration rebuilds its pullbacks, runs its tasks, and sums the gradients of the iteration above
it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.layer_layout import Segment
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.parallel.gathered_params import cast_for_products
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import Action, is_reduction
from moe_jax.schedule.scanned import ScannedSchedule
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop_grads import LoopGradients, StackLayout
from moe_jax.step.scheduled.param_gathering import ParamGathering, but_experts, with_experts
from moe_jax.step.scheduled.saved_values import SavedValues
from moe_jax.step.scheduled.scan_residuals import BlockConsts, ScanBody

Whole = dict[int, Tree]  # gathered weights of an iteration's blocks, by the numbers of iteration 0
# the residual stream of each microbatch, weights, saved values that are not in host memory yet
_Forward = tuple[list[jax.Array], Whole | None, list[jax.Array]]
# cotangents of the stream, gradients, weights, saved values that are back from host memory
_Backward = tuple[list[jax.Array], Tree, Whole | None, list[jax.Array]]


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


class LayerScan:
    """The forward and backward scans of a step over a segment. `sums` and its tasks run everything outside
    the scans.
    """

    def __init__(self, scanned: ScannedSchedule, segment: Segment, sums: GradientReducer, stacked: Stacked):
        self.scanned, self.scan_blocks = scanned, scanned.blocks
        self.sums, self.tasks = sums, sums.tasks
        (
            self.params,
            self.gathers,
            self.shard_specs,
            self.earlier,
            self.router_inputs,
            self.slot_ME,
            self.document_BN,
        ) = stacked
        self.layout = StackLayout(self.scan_blocks, len(segment.kinds))
        self.microbatches = range(self.tasks.dims.microbatches)
        self.gradients: LoopGradients
        self.moe = [b for b in self._blocks if self.tasks.dims.shape.kinds[b] == "moe"]

    @property
    def _blocks(self) -> range:
        """The blocks of iteration 0, whose numbers all iterations use inside the scan."""
        return range(self.scan_blocks.first, self.scan_blocks.first + self.scan_blocks.size)

    def _consts(self, iteration: int | jax.Array, x: jax.Array, whole: Whole | None, shift: int) -> BlockConsts:
        """Return the constants of an iteration that begins with `x`. Its weights are `whole` if devices have shards of
        them; it then gathers those of the iteration `shift` above or below it.
        """
        own = {block: self._for_products(block, iteration, x) for block in self._blocks}
        weights = own if whole is None else self._with_local(whole, own)
        shards = None
        if whole is not None:
            other = jnp.clip(iteration + shift, 0, self.scan_blocks.count - 1)
            named = max(shift, 0) * self.scan_blocks.size
            shards = {block + named: self.layout.take(self.params, other, block) for block in self._blocks}
        slot_ME = self.slot_ME
        placements = {} if slot_ME is None else {b: self._of_moe_block(slot_ME, iteration, b) for b in self.moe}
        router_inputs = self.router_inputs and self.router_inputs.above(iteration * self.scan_blocks.size)
        return BlockConsts(weights, router_inputs, placements, self.document_BN, shards)

    def _for_products(self, block: int, iteration: int | jax.Array, x: jax.Array) -> Tree:
        """Return the stored weights of a block as products read them.

        On TPUs no earlier than `x`: outside of loops XLA would copy them when the step begins.
        """
        platform = self.tasks.dims.compute.platform
        number = depend_on(jnp.int32(iteration), x, platform) if platform == "tpu" else iteration
        weights = self.layout.take(self.params, number, block)
        return cast_for_products(self.gathers[self.layout.place(0, block)[1]], weights)

    def _gathering(self, consts: BlockConsts, shift: int) -> ParamGathering | None:
        """Return what gathers the weights of another iteration's blocks, named like those of the next one, or in
        the backward pass (`shift` -1) like this iteration's own.
        """
        if consts.shards is None:
            return None
        named = max(shift, 0) * self.scan_blocks.size
        place = {block: self.layout.place(0, block)[1] for block in self._blocks}
        gathers = {block + named: self.gathers[place[block]] for block in self._blocks}
        return ParamGathering(gathers, consts.shards, {}, self.tasks.dims.config)

    def _gathered(self, tasks: Tasks, shift: int) -> Whole | None:
        """Return the weights that an iteration has gathered, by the numbers that their own iteration uses."""
        if tasks.gathering is None:
            return None
        named = max(shift, 0) * self.scan_blocks.size
        for block in self._blocks:
            tasks.gathering.arrive(block + named)
        return {block: tasks.gathering.whole[block + named] for block in self._blocks}

    def _whole(self, iteration: int) -> Whole | None:
        """Return the weights of an iteration that were gathered outside of the scans."""
        if self.tasks.gathering is None:
            return None
        numbers = {block: block + iteration * self.scan_blocks.size for block in self._blocks}
        for number in numbers.values():
            self.tasks.gathering.arrive(number)
        weights = {block: self.tasks.blocks[number] for block, number in numbers.items()}
        return {block: but_experts(own) for block, own in weights.items()} if self._has_local_experts else weights

    @property
    def _has_local_experts(self) -> bool:
        return self.tasks.dims.shape.local_experts

    def _with_local(self, whole: Whole, own: Whole) -> Whole:
        """Return gathered weights of blocks with those of this device's own experts, if no other device has them."""
        if not self._has_local_experts:
            return whole
        return {block: with_experts(weights, own.get(block)) for block, weights in whole.items()}

    def forward(self) -> None:
        """Run the forward scan over all iterations but the highest, whose tasks follow."""
        for r in self.microbatches:
            self.tasks.add_combine_to_residual(r, self.scan_blocks.first)

        def run_forward(x: list[jax.Array], consts: BlockConsts) -> tuple[Tree, Tree, Tree]:
            tasks = Tasks(self.tasks.dims, None, consts, gathering=self._gathering(consts, 1))
            tasks.x = dict(zip(self.microbatches, x, strict=True))
            run(self.scanned.forward_body, tasks, self.sums)
            for r in self.microbatches:
                tasks.add_combine_to_residual(r, self.scan_blocks.first + self.scan_blocks.size)
            self.tasks.widths = tasks.widths
            of_block = ([tasks.stats[block, r] for r in self.microbatches] for block in self.moe)
            stats = [jax.tree.map(lambda *parts: sum(parts), *parts) for parts in of_block]
            results = (stats, tasks.max_logit_LH()), tasks.order.end_of_iteration(), self._gathered(tasks, 1)
            return (
                [tasks.x[r] for r in self.microbatches],
                results,
                (tasks.pullbacks.stored, tasks.lane_overflow.overflows),
            )

        x = [self.tasks.x[r] for r in self.microbatches]
        whole = self._whole(0)
        consts = jax.eval_shape(lambda: self._consts(0, x[0], whole, 1))
        self.body = ScanBody(run_forward, jax.eval_shape(lambda: x), consts)

        offload = self.tasks.dims.config.schedule.offload_activations
        self.saved = SavedValues(self.body.stacked_shapes, offload)

        def step(carry: _Forward, number: jax.Array) -> tuple[_Forward, Tree]:
            x, whole, before = carry
            x, (of_blocks, end, whole), values = self.body(x, self._consts(number, x[0], whole, 1))
            stacked, waiting = self.saved.store(values, before)
            return (x, whole, waiting), (of_blocks, end, stacked)

        highest = self.scan_blocks.count - 1
        numbers = self.tasks.order.into_loop(jnp.arange(highest))
        carry = x, whole, self.saved.before_first()
        (x, whole, self.saved.last), results = jax.lax.scan(step, carry, numbers)
        (stats, max_logits), ends, self.saved.stacks = results
        self.tasks.order.out_of_loop(ends)
        self.tasks.x = dict(zip(self.microbatches, x, strict=True))
        if max_logits is not None:
            self.tasks.max_logits[self.scan_blocks.first] = max_logits.reshape(-1, max_logits.shape[-1])
        if self.moe:
            in_order = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *stats)
            self.sums.loop_stats[self.scan_blocks.first] = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), in_order
            )
        above = highest * self.scan_blocks.size
        if whole is not None:
            whole = {block + above: weights for block, weights in whole.items()}
            self.tasks.blocks |= self._with_local(whole, self.tasks.blocks)

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
        highest = self.scan_blocks.count - 1
        self.gradients = LoopGradients(
            *(self.layout, self.shard_specs, self.params, self.scan_blocks.count if self.scanned.reduction_body else 1),
            sharded=self.tasks.gathering is not None,
        )
        for block in self._blocks:
            self.gradients.put(highest, block, self.sums.own(block + highest * self.scan_blocks.size + 1))
        late = any(map(is_reduction, self.scanned.backward_body))
        share_ME = self.sums.share_ME if self.moe else None  # computed outside the loop

        def step(carry: _Backward, number: jax.Array) -> tuple[_Backward, Tree]:
            dx, self.gradients.state, whole, fetched = carry
            consts = self._consts(number, dx[0], whole, -1)
            tasks = Tasks(self.tasks.dims, None, BlockConsts(consts.blocks), gathering=self._gathering(consts, -1))
            self._restore(tasks, self.saved.values(number, fetched), consts)
            fetched = self.saved.fetch(number - 1)
            sums = GradientReducer(self.sums.reductions, tasks, self._earlier(number))
            if share_ME is not None:
                tasks.share = partial(self._of_moe_block, share_ME, number)
            tasks.dx = dict(zip(self.microbatches, dx, strict=True))
            if late:
                self._take(sums, number + 1, self.scan_blocks.size)
            for r in reversed(self.microbatches):
                tasks.add_combine_to_residual_back(r, self.scan_blocks.first + self.scan_blocks.size)
            run(self.scanned.backward_body, tasks, sums, self.scan_blocks.size)  # as the lowest iteration's
            if late:
                self._put_totals(sums, number + 1, self.scan_blocks.size)
            for block in self._blocks:
                self.gradients.put(number, block, sums.own(block + 1))
            dx = [tasks.dx[r] for r in self.microbatches]
            return (dx, self.gradients.state, self._gathered(tasks, -1), fetched), tasks.order.end_of_iteration()

        dx = [self.tasks.dx[r] for r in self.microbatches]
        numbers = self.tasks.order.into_loop(jnp.arange(1, highest))
        carry = dx, self.gradients.state, self._whole(highest - 1), self.saved.last
        (dx, self.gradients.state, whole, fetched), ends = jax.lax.scan(step, carry, numbers, reverse=True)
        self.tasks.order.out_of_loop(ends)
        self.tasks.dx = dict(zip(self.microbatches, dx, strict=True))
        self.tasks.blocks |= self._with_local(whole or {}, self.tasks.blocks)
        self._restore(self.tasks, self.saved.values(0, fetched), self._consts(0, dx[0], whole, -1))
        for r in reversed(self.microbatches):
            self.tasks.add_combine_to_residual_back(r, self.scan_blocks.first + self.scan_blocks.size)
        if late:
            self._take(self.sums, 1, self.scan_blocks.size)

    def reduce(self) -> None:
        """Store the gradients of the lowest iteration, and run the reductions that follow the backward pass."""
        if not self.scanned.reduction_body:
            if self.sums.loop_gradients:
                self._put_totals(self.sums, 1, self.scan_blocks.size)
            for block in self._blocks:
                self.gradients.put_sum(0, block, self.sums.total(block + 1))
            return
        for block in self._blocks:
            self.gradients.put(0, block, self.sums.own(block + 1))

        def step(state: Tree, number: jax.Array) -> tuple[Tree, Tree]:
            self.gradients.state = state
            sums = GradientReducer(self.sums.reductions, Tasks(self.tasks.dims, None, BlockConsts({})), None)
            self._take(sums, number)
            run(self.scanned.reduction_body, sums.tasks, sums)
            self._put_totals(sums, number)
            return self.gradients.state, sums.tasks.order.end_of_iteration()

        numbers = self.tasks.order.into_loop(jnp.arange(self.scan_blocks.count))
        self.gradients.state, ends = jax.lax.scan(step, self.gradients.state, numbers, reverse=True)
        self.tasks.order.out_of_loop(ends)

    def _take(self, sums: GradientReducer, iteration: int | jax.Array, shift: int = 0) -> None:
        """Pass the gradients of an iteration to `sums`."""
        for block in self._blocks:
            sums.loop_gradients[block + shift + 1] = self.gradients.take(iteration, block)

    def _put_totals(self, sums: GradientReducer, iteration: int | jax.Array, shift: int = 0) -> None:
        for block in self._blocks:
            owner = block + shift + 1
            self.gradients.put_sum(iteration, block, sums.total(owner), sums.loop_gradients[owner])

    def _earlier(self, iteration: jax.Array) -> Callable[[int], Tree] | None:
        if self.earlier is None:
            return None
        return lambda owner: self.layout.take(self.earlier, iteration, owner - 1)

    def _of_moe_block(self, of_all_M: jax.Array, iteration: int | jax.Array, block: int) -> jax.Array:
        """Return the entry of a block in an iteration, from an array over all blocks with experts."""
        below = self.tasks.dims.shape.kinds[: self.scan_blocks.first].count("moe")
        place = below + iteration * len(self.moe) + self.moe.index(block)
        return jax.lax.dynamic_index_in_dim(of_all_M, place, keepdims=False)
