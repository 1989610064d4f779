"""Run the blocks of one model chunk, forward and backward: tasks in the order of a schedule, like those of a whole
step.

The residuals of the forward pass are flattened into arrays, which can stay in buffers for many ticks, and restored
later. With `schedule.remat=chunk` only the chunk's input and output are stored between the two passes, and no rows of
other devices: the backward pass recomputes the forward pass, exchanges included, and residuals exist only during it.

b sequences of one microbatch on this device, N tokens of each, D model width, m blocks with experts in the chunk, E
experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.models.dispatchers.ragged import Overflow
from moe_jax.models.moe import RouterStats
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.step.losses import ObjectiveParts, parts_of
from moe_jax.step.pipelined.buffer_reuse import BufferSlot, assign_buffer_slots
from moe_jax.step.pipelined.build import Orders
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop import run
from moe_jax.step.scheduled.pullbacks import TaskKey
from moe_jax.step.scheduled.scan_residuals import BlockConsts, ScanBody
from moe_jax.step.scheduled.split_vjp import Pullback
from moe_jax.step.scheduled.step_dims import StepDims

_Results = tuple[ObjectiveParts | None, jax.Array | None]  # see `ForwardResult`


class _ChunkResiduals(NamedTuple):
    """What the backward pass needs from the forward pass."""

    pullbacks: dict[TaskKey, Pullback]
    overflows: dict[tuple[int, int], Overflow]
    share_mE: jax.Array | None  # each expert's share of a block's (token, choice) pairs; None without experts
    x_bND: jax.Array  # after the highest block


class ForwardResult(NamedTuple):
    """The results of a forward pass."""

    x_bND: jax.Array  # the residual stream after the chunk
    parts: ObjectiveParts | None  # terms of the objective; None without experts
    max_logit_lH: jax.Array | None  # the largest attention logits of the chunk's l blocks, if they are asked for
    residuals: list[jax.Array]  # for the backward pass


class Backward(NamedTuple):
    """The results of a backward pass."""

    dx_bND: jax.Array  # gradient of the chunk's input
    grads: list[Tree]  # by block, like its parameters


class InputGradient(NamedTuple):
    """The results of a backward pass without weight gradients."""

    dx_bND: jax.Array
    reused: list[jax.Array]  # for weight gradients: values for `buffer_slots` of the residuals
    buffered: list[jax.Array]  # for weight gradients: values for separate buffers


class ModelChunk:
    """The passes of a model chunk, in these task orders. Constructed inside `shard_map`; `consts` are shapes.

    `saved_shapes` are the shapes of the forward pass's residuals. If weight gradients are separate, the backward pass
    stores what they need in `buffer_slots` of residuals that are no longer read, and the rest in buffers of
    `buffered_shapes`.
    """

    def __init__(self, dims: StepDims, orders: Orders, x_bND: jax.ShapeDtypeStruct, consts: BlockConsts):
        self.dims, self._orders = dims, orders
        self._microbatches = range(dims.microbatches)
        self._num_blocks = len(dims.shape.kinds)
        self._moe = [block for block, kind in enumerate(dims.shape.kinds) if kind == "moe"]
        self._forward_body = ScanBody(self._run_forward, x_bND, consts)
        self.saved_shapes = self._forward_body.stacked_shapes
        self.buffer_slots: list[BufferSlot] = []
        self.buffered_shapes: list[jax.ShapeDtypeStruct] = []
        if orders.weight:
            self._backward_body = ScanBody(self._run_input_gradient, (x_bND, self.saved_shapes), consts)
            # needed values that are residuals already: leaves of the carry after its first, the gradient
            self._residual_of = [None if leaf is None else leaf - 1 for leaf in self._backward_body.stacked_inputs]
            waiting = {
                i: shape for i, shape in enumerate(self._backward_body.stacked_shapes) if self._residual_of[i] is None
            }
            unread = {i: shape for i, shape in enumerate(self.saved_shapes) if i not in self._residual_of}
            buffer_slots = assign_buffer_slots(waiting, unread)
            self._reused, self.buffer_slots = list(buffer_slots), list(buffer_slots.values())
            self._buffered = [i for i in waiting if i not in buffer_slots]
            self.buffered_shapes = [waiting[i] for i in self._buffered]

    def forward(self, x_bND: jax.Array, consts: BlockConsts) -> ForwardResult:
        """Run the forward pass."""
        x_bND, (parts, max_logit_lH), residuals = self._forward_body(x_bND, consts)
        return ForwardResult(x_bND, parts, max_logit_lH, residuals)

    def output(self, consts: BlockConsts, residuals: Sequence[jax.Array]) -> jax.Array:
        """Return the residual stream after the chunk, from the residuals."""
        return self._forward_body.rebuild(consts, residuals).x_bND

    def backward(self, dx_bND: jax.Array, consts: BlockConsts, residuals: Sequence[jax.Array]) -> Backward:
        """Run the backward pass."""
        tasks = self._start_backward(dx_bND, consts, residuals)
        run(self._orders.backward, tasks, GradientReducer.of_device(tasks))
        return Backward(self._joined(tasks.dx), self._gradients(tasks))

    def together(
        self,
        x_bND: jax.Array,
        forward_consts: BlockConsts,
        dx_bND: jax.Array,
        backward_consts: BlockConsts,
        residuals: Sequence[jax.Array],
    ) -> tuple[ForwardResult, Backward | InputGradient]:
        """Run the forward pass of one microbatch concurrently with the backward pass of another.

        The backward pass has no weight gradients if these are separate.
        """
        fwd, bwd = (
            self._start_forward(x_bND, forward_consts),
            self._start_backward(dx_bND, backward_consts, residuals),
        )
        bwd.order = fwd.order
        bwd.awaits_rows = True  # the forward pass is there to hide exchanges
        sides = {"F": (fwd, GradientReducer.of_device(fwd)), "B": (bwd, GradientReducer.of_device(bwd))}
        for side, action in self._orders.together:
            run([action], *sides[side])
        x_bND, (parts, max_logit_lH), saved = self._end_forward(*sides["F"])
        forward = ForwardResult(x_bND, parts, max_logit_lH, self._forward_body.stacked_of(saved))
        if not self._orders.weight:
            return forward, Backward(self._joined(bwd.dx), self._gradients(bwd))
        return forward, self._left(self._joined(bwd.dx), self._backward_body.stacked_of(_waiting(bwd)))

    def input_gradient(self, dx_bND: jax.Array, consts: BlockConsts, residuals: Sequence[jax.Array]) -> InputGradient:
        """Return the gradient of the chunk's input, and what `weight_gradients` needs besides the unchanged
        residuals.
        """
        dx_bND, _, stacked = self._backward_body((dx_bND, list(residuals)), consts)
        return self._left(dx_bND, stacked)

    def weight_gradients(
        self,
        consts: BlockConsts,
        residuals: Sequence[jax.Array],
        reused: Sequence[jax.Array],
        buffered: Sequence[jax.Array],
    ) -> list[Tree]:
        """Return the gradients of each block's parameters."""
        stacked = {i: residuals[place] for i, place in enumerate(self._residual_of) if place is not None}
        stacked |= dict(zip([*self._reused, *self._buffered], [*reused, *buffered], strict=True))
        waiting, rare, positions = self._backward_body.rebuild(consts, [stacked[i] for i in range(len(stacked))])
        tasks = self._tasks(consts)
        tasks.pullbacks.waiting = {
            key: self._traced.pullbacks.waiting[key].with_residuals(values) for key, values in waiting.items()
        }
        tasks.lane_overflow.restore(rare, self._traced.lane_overflow)
        tasks.pullbacks.stored |= positions
        run(self._orders.weight, tasks, GradientReducer.of_device(tasks))
        return self._gradients(tasks)

    def _run_forward(self, x_bND: jax.Array, consts: BlockConsts) -> tuple[jax.Array, _Results, _ChunkResiduals]:
        tasks = self._start_forward(x_bND, consts)
        sums = GradientReducer.of_device(tasks)
        run(self._orders.forward, tasks, sums)
        return self._end_forward(tasks, sums)

    def _run_input_gradient(
        self, bwd: tuple[jax.Array, list[jax.Array]], consts: BlockConsts
    ) -> tuple[jax.Array, None, Tree]:
        tasks = self._traced = self._start_backward(bwd[0], consts, bwd[1])
        run(self._orders.backward, tasks, GradientReducer.of_device(tasks))
        return self._joined(tasks.dx), None, _waiting(tasks)

    def _left(self, dx_bND: jax.Array, stacked: list[jax.Array]) -> InputGradient:
        return InputGradient(
            dx_bND,
            reused=[stacked[i] for i in self._reused],
            buffered=[stacked[i] for i in self._buffered],
        )

    def _start_forward(self, x_bND: jax.Array, consts: BlockConsts) -> Tasks:
        tasks = self._tasks(consts)
        tasks.x = dict(enumerate(jnp.split(x_bND, len(self._microbatches))))
        return tasks

    def _end_forward(self, tasks: Tasks, sums: GradientReducer) -> tuple[jax.Array, _Results, _ChunkResiduals]:
        for r in self._microbatches:
            tasks.add_combine_to_residual(r, self._num_blocks)
        self._widths = tasks.widths
        stats: RouterStats | None = sums.stats()
        parts = None
        if stats is not None:
            parts = parts_of(tasks.heads.losses, stats, sums.count_ME, self.dims.routed_tokens, sums.model.moe)
        x_bND = self._joined(tasks.x)
        saved = _ChunkResiduals(
            tasks.pullbacks.stored, tasks.lane_overflow.overflows, sums.share_ME if self._moe else None, x_bND
        )
        return x_bND, (parts, tasks.max_logit_LH()), saved

    def _start_backward(self, dx_bND: jax.Array, consts: BlockConsts, residuals: Sequence[jax.Array]) -> Tasks:
        saved: _ChunkResiduals = self._forward_body.rebuild(consts, residuals)
        tasks = self._tasks(consts)
        tasks.pullbacks.stored, tasks.lane_overflow.overflows = saved.pullbacks, saved.overflows
        tasks.widths = self._widths
        share_mE = saved.share_mE
        if share_mE is not None:
            tasks.share = lambda block: share_mE[self._moe.index(block)]
        tasks.dx = dict(enumerate(jnp.split(dx_bND, len(self._microbatches))))
        for r in reversed(self._microbatches):
            tasks.add_combine_to_residual_back(r, self._num_blocks)
        return tasks

    def _joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        return jnp.concatenate([parts[r] for r in self._microbatches])

    def _gradients(self, tasks: Tasks) -> list[Tree]:
        sums = GradientReducer.of_device(tasks)
        return [sums.own(block + 1) for block in range(self._num_blocks)]

    def _tasks(self, consts: BlockConsts) -> Tasks:
        return Tasks(self.dims, None, consts)


def _waiting(tasks: Tasks) -> Tree:
    """Return what the weight gradients need."""
    waiting = {key: pullback.residuals() for key, pullback in tasks.pullbacks.waiting.items()}
    return waiting, tasks.lane_overflow.residuals(), tasks.hot.positions()


class RecomputedChunk:
    """The passes of a model chunk, with the interface of `ModelChunk`. Weight gradients are never separate."""

    def __init__(self, chunk: ModelChunk, x_bND: jax.ShapeDtypeStruct):
        self._chunk = chunk
        self.saved_shapes = [x_bND, x_bND]  # input and output
        self.buffer_slots: list[BufferSlot] = []
        self.buffered_shapes: list[jax.ShapeDtypeStruct] = []

    @property
    def dims(self) -> StepDims:
        return self._chunk.dims

    def forward(self, x_bND: jax.Array, consts: BlockConsts) -> ForwardResult:
        """Run the forward pass."""
        return _store_ends(x_bND, self._chunk.forward(x_bND, consts))

    def output(self, consts: BlockConsts, residuals: Sequence[jax.Array]) -> jax.Array:
        """Return the residual stream after the chunk."""
        return residuals[1]

    def backward(self, dx_bND: jax.Array, consts: BlockConsts, residuals: Sequence[jax.Array]) -> Backward:
        """Recompute the forward pass, and run the backward pass."""
        return self._chunk.backward(dx_bND, consts, self._recompute(consts, residuals).residuals)

    def together(
        self,
        x_bND: jax.Array,
        forward_consts: BlockConsts,
        dx_bND: jax.Array,
        backward_consts: BlockConsts,
        residuals: Sequence[jax.Array],
    ) -> tuple[ForwardResult, Backward | InputGradient]:
        """Recompute one microbatch's forward pass, and then run its backward pass concurrently with another
        microbatch's forward pass.
        """
        recomputed = self._recompute(backward_consts, residuals)
        # so that the exchanges of both forward passes have the same order on all ranks
        next_bND = depend_on(x_bND, recomputed.x_bND, self.dims.compute.platform)
        forward, backward = self._chunk.together(
            next_bND, forward_consts, dx_bND, backward_consts, recomputed.residuals
        )
        return _store_ends(x_bND, forward), backward

    def _recompute(self, consts: BlockConsts, residuals: Sequence[jax.Array]) -> ForwardResult:
        with jax.named_scope("recompute"):
            return self._chunk.forward(residuals[0], consts)


def _store_ends(x_bND: jax.Array, done: ForwardResult) -> ForwardResult:
    """Replace the residuals of a forward pass by its input and output."""
    return done._replace(residuals=[x_bND, done.x_bND])
