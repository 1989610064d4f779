"""The blocks of one model chunk, forward and backward: tasks in the order of a schedule, like those of a whole step.

What the forward pass keeps is taken apart into arrays, which may lie in buffers for many ticks, and put together again.

b sequences of one microbatch on this device, N tokens of each, D model width, m blocks with experts in the chunk,
E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.models.dispatchers.ragged import Overflow
from moe_jax.models.moe import RouterStats
from moe_jax.parallel.trees import Tree
from moe_jax.step.losses import ObjectiveParts, parts_of
from moe_jax.step.pipelined.buffer_reuse import BufferSlot, find_rooms
from moe_jax.step.pipelined.build import Orders
from moe_jax.step.scheduled.executor import Key, Tasks
from moe_jax.step.scheduled.grad_buckets import Reduction
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop import run
from moe_jax.step.scheduled.scan_residuals import Given, ScanBody
from moe_jax.step.scheduled.split_vjp import Pullback
from moe_jax.step.scheduled.step_dims import StepDims


class _Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    pullbacks: dict[Key, Pullback]
    overflows: dict[tuple[int, int], Overflow]
    share_mE: jax.Array | None  # of all pairs of a block that chose each expert; None without experts
    x_bND: jax.Array  # behind the highest block


class ForwardResult(NamedTuple):
    """What comes out of a forward pass."""

    x_bND: jax.Array  # the residual stream behind the chunk
    parts: ObjectiveParts | None  # of the objective; None without experts
    kept: list[jax.Array]  # for the backward pass


class Backward(NamedTuple):
    """What comes out of a backward pass."""

    dx_bND: jax.Array  # gradient of the chunk's input
    grads: list[Tree]  # of each block's parameters


class InputGradient(NamedTuple):
    """What comes out of a backward pass without weight gradients."""

    dx_bND: jax.Array
    moved: list[jax.Array]  # what weight gradients wait for: for the rooms among what is kept
    held: list[jax.Array]  # and for buffers of its own


class ModelChunk:
    """A chunk whose passes have these orders. Made inside `shard_map`; `given` are shapes.

    `saved_shapes` are those of the arrays that the forward pass keeps. If weight gradients are apart, activation
    gradients leave them arrays in `rooms` of others that nobody reads any more, and beside these `held_shapes`.
    """

    def __init__(self, facts: StepDims, orders: Orders, x_bND: jax.ShapeDtypeStruct, given: Given):
        self.facts, self._orders = facts, orders
        self._microbatches = range(facts.microbatches)
        self._num_blocks = len(facts.shape.kinds)
        self._moe = [block for block, kind in enumerate(facts.shape.kinds) if kind == "moe"]
        self._turn = ScanBody(self._run_forward, x_bND, given)
        self.saved_shapes = self._turn.stacked_shapes
        self.rooms: list[BufferSlot] = []
        self.held_shapes: list[jax.ShapeDtypeStruct] = []
        if orders.weight:
            self._turn_back = ScanBody(self._run_input_gradient, (x_bND, self.saved_shapes), given)
            # what is kept of the forward pass anyway, behind the gradient in the turn's carry
            self._kept = [None if leaf is None else leaf - 1 for leaf in self._turn_back.stacked_inputs]
            waiting = {i: shape for i, shape in enumerate(self._turn_back.stacked_shapes) if self._kept[i] is None}
            unread = {i: shape for i, shape in enumerate(self.saved_shapes) if i not in self._kept}
            rooms = find_rooms(waiting, unread)
            self._moved, self.rooms = list(rooms), list(rooms.values())
            self._held = [i for i in waiting if i not in rooms]
            self.held_shapes = [waiting[i] for i in self._held]

    def forward(self, x_bND: jax.Array, given: Given) -> ForwardResult:
        """The forward pass."""
        return ForwardResult(*self._turn(x_bND, given))

    def output(self, given: Given, kept: Sequence[jax.Array]) -> jax.Array:
        """The residual stream behind the chunk, from what was kept."""
        return self._turn.rebuild(given, kept).x_bND

    def backward(self, dx_bND: jax.Array, given: Given, kept: Sequence[jax.Array]) -> Backward:
        """The backward pass."""
        tasks = self._start_backward(dx_bND, given, kept)
        run(self._orders.backward, tasks, self._sums(tasks))
        return Backward(self._joined(tasks.dx), self._gradients(tasks))

    def together(
        self,
        x_bND: jax.Array,
        ahead_given: Given,
        dx_bND: jax.Array,
        behind_given: Given,
        kept: Sequence[jax.Array],
    ) -> tuple[ForwardResult, Backward | InputGradient]:
        """The forward pass of one microbatch beside the backward pass of another, without its weight gradients if these
        are apart.
        """
        ahead, behind = (
            self._start_forward(x_bND, ahead_given),
            self._start_backward(dx_bND, behind_given, kept),
        )
        behind.ties = ahead.ties
        behind.awaits_rows = True  # the forward pass is there to hide exchanges
        sides = {"F": (ahead, self._sums(ahead)), "B": (behind, self._sums(behind))}
        for side, action in self._orders.together:
            run([action], *sides[side])
        x_bND, parts, saved = self._end_forward(*sides["F"])
        forward = ForwardResult(x_bND, parts, self._turn.stacked_of(saved))
        if not self._orders.weight:
            return forward, Backward(self._joined(behind.dx), self._gradients(behind))
        return forward, self._left(self._joined(behind.dx), self._turn_back.stacked_of(_waiting(behind)))

    def input_gradient(self, dx_bND: jax.Array, given: Given, kept: Sequence[jax.Array]) -> InputGradient:
        """The gradient of the chunk's input, and what `weight_gradients` needs beside what is left as it was."""
        dx_bND, _, stacked = self._turn_back((dx_bND, list(kept)), given)
        return self._left(dx_bND, stacked)

    def weight_gradients(
        self, given: Given, kept: Sequence[jax.Array], moved: Sequence[jax.Array], held: Sequence[jax.Array]
    ) -> list[Tree]:
        """Gradients of each block's parameters."""
        stacked = {i: kept[place] for i, place in enumerate(self._kept) if place is not None}
        stacked |= dict(zip([*self._moved, *self._held], [*moved, *held], strict=True))
        waiting, rare = self._turn_back.rebuild(given, [stacked[i] for i in range(len(stacked))])
        tasks = self._tasks(given)
        tasks.waiting = {key: self._traced.waiting[key].holding(values) for key, values in waiting.items()}
        tasks.rare.hold(rare, self._traced.rare)
        run(self._orders.weight, tasks, self._sums(tasks))
        return self._gradients(tasks)

    def _run_forward(self, x_bND: jax.Array, given: Given) -> tuple[jax.Array, ObjectiveParts | None, _Saved]:
        tasks = self._start_forward(x_bND, given)
        sums = self._sums(tasks)
        run(self._orders.forward, tasks, sums)
        return self._end_forward(tasks, sums)

    def _run_input_gradient(
        self, behind: tuple[jax.Array, list[jax.Array]], given: Given
    ) -> tuple[jax.Array, None, Tree]:
        tasks = self._traced = self._start_backward(behind[0], given, behind[1])
        run(self._orders.backward, tasks, self._sums(tasks))
        return self._joined(tasks.dx), None, _waiting(tasks)

    def _left(self, dx_bND: jax.Array, stacked: list[jax.Array]) -> InputGradient:
        return InputGradient(
            dx_bND,
            moved=[stacked[i] for i in self._moved],
            held=[stacked[i] for i in self._held],
        )

    def _start_forward(self, x_bND: jax.Array, given: Given) -> Tasks:
        tasks = self._tasks(given)
        tasks.x = dict(enumerate(jnp.split(x_bND, len(self._microbatches))))
        return tasks

    def _end_forward(self, tasks: Tasks, sums: GradientReducer) -> tuple[jax.Array, ObjectiveParts | None, _Saved]:
        for r in self._microbatches:
            tasks.settle(r, self._num_blocks)
        self._widths = tasks.widths
        stats: RouterStats | None = sums.stats()
        parts = None
        if stats is not None:
            parts = parts_of(jnp.float32(0), stats, sums.count_ME, self.facts.global_tokens, sums.model.moe)
        x_bND = self._joined(tasks.x)
        saved = _Saved(tasks.pullbacks, tasks.rare.overflows, sums.share_ME if self._moe else None, x_bND)
        return x_bND, parts, saved

    def _start_backward(self, dx_bND: jax.Array, given: Given, kept: Sequence[jax.Array]) -> Tasks:
        saved: _Saved = self._turn.rebuild(given, kept)
        tasks = self._tasks(given)
        tasks.pullbacks, tasks.rare.overflows = saved.pullbacks, saved.overflows
        tasks.widths = self._widths
        share_mE = saved.share_mE
        if share_mE is not None:
            tasks.share = lambda block: share_mE[self._moe.index(block)]
        tasks.dx = dict(enumerate(jnp.split(dx_bND, len(self._microbatches))))
        for r in reversed(self._microbatches):
            tasks.settle_back(r, self._num_blocks)
        return tasks

    def _joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        return jnp.concatenate([parts[r] for r in self._microbatches])

    def _gradients(self, tasks: Tasks) -> list[Tree]:
        sums = self._sums(tasks)
        return [sums.own(block + 1) for block in range(self._num_blocks)]

    def _tasks(self, given: Given) -> Tasks:
        return Tasks(self.facts, None, given)

    def _sums(self, tasks: Tasks) -> GradientReducer:
        nothing = Reduction(vectors=(), cuts=(), chunks=())
        return GradientReducer((nothing,) * (self._num_blocks + 2), tasks, None)


def _waiting(tasks: Tasks) -> Tree:
    """What weight gradients wait for."""
    return {key: pullback.held() for key, pullback in tasks.waiting.items()}, tasks.rare.held()
