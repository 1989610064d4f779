"""The blocks of one model chunk, forward and backward: tasks in the order of a schedule, like those of a whole step.

What the forward pass keeps is taken apart into arrays, which may lie in buffers for many ticks, and put together again.

b sequences of one microbatch on this device, N tokens of each, D model width, m blocks with experts in the chunk,
E experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.models.moe import RouterStats
from moe_jax.schedule.actions import Action
from moe_jax.schedule.schedule import Schedule
from moe_jax.train.facts import Facts
from moe_jax.train.objective import Parts, parts_of
from moe_jax.train.reduction import Reduction
from moe_jax.train.residuals import Turn
from moe_jax.train.sums import Sums
from moe_jax.train.tasks import Tasks
from moe_jax.train.turns import run

Tree = Any
_ENDS = ("embed", "head")


class _Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    pullbacks: Any
    overflows: Any
    share_mE: Any  # of all pairs of a block that chose each expert; None without experts
    x_bND: jax.Array  # behind the highest block


class Chunk:
    """A chunk of this schedule. Made inside `shard_map`; `weights` are those of each block, as shapes.

    `saved_shapes` are those of the arrays that the forward pass keeps; with `weight_apart`, `held_shapes` of those that
    activation gradients leave to weight gradients.
    """

    def __init__(
        self,
        facts: Facts,
        schedule: Schedule,
        x_bND: jax.ShapeDtypeStruct,
        weights: dict[int, Tree],
        weight_apart: bool,
    ):
        self.facts = facts
        self._up = [a for a in schedule.actions if a.op not in _ENDS and (a.direction == "F" or a.op == "counts")]
        self._down = [a for a in schedule.actions if a.op not in _ENDS and a.direction in ("B", "W")]
        self._down_b, self._down_w = ([a for a in self._down if a.direction == d] for d in ("B", "W"))
        self._microbatches = range(facts.microbatches)
        self._num_blocks = len(facts.shape.kinds)
        self._moe = [block for block, kind in enumerate(facts.shape.kinds) if kind == "moe"]
        self._turn = Turn(self._forward, x_bND, weights)
        self.saved_shapes = self._turn.stacked_shapes
        self.held_shapes: list[jax.ShapeDtypeStruct] = []
        if weight_apart:
            self._turn_back = Turn(self._input_gradient, (x_bND, self.saved_shapes), weights)
            # what B reads of the forward pass lies where it is; behind the gradient come the values kept
            self._place = [None if leaf is None else leaf - 1 for leaf in self._turn_back.stacked_inputs]
            stacked = zip(self._turn_back.stacked_shapes, self._place, strict=True)
            self.held_shapes = [shape for shape, place in stacked if place is None]

    def forward(self, x_bND: jax.Array, weights: dict[int, Tree]) -> tuple[jax.Array, Parts | None, list[jax.Array]]:
        """The residual stream behind the chunk, its part of the objective, and what is to be kept."""
        return self._turn(x_bND, weights)

    def output(self, weights: dict[int, Tree], kept: Sequence[jax.Array]) -> jax.Array:
        """The residual stream behind the chunk, from what was kept."""
        return self._turn.rebuild(weights, kept).x_bND

    def backward(
        self, dx_bND: jax.Array, weights: dict[int, Tree], kept: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[Tree]]:
        """Gradients of the chunk's input and of each block's parameters."""
        tasks = self._run_down(self._down, dx_bND, weights, kept)
        return self._joined(tasks.dx), self._gradients(tasks)

    def input_gradient(
        self, dx_bND: jax.Array, weights: dict[int, Tree], kept: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The gradient of the chunk's input, and what `weight_gradients` needs beside what was kept."""
        dx_bND, _, stacked = self._turn_back((dx_bND, list(kept)), weights)
        return dx_bND, [value for value, place in zip(stacked, self._place, strict=True) if place is None]

    def weight_gradients(
        self, weights: dict[int, Tree], kept: Sequence[jax.Array], held: Sequence[jax.Array]
    ) -> list[Tree]:
        """Gradients of each block's parameters."""
        own = iter(held)
        stacked = [next(own) if place is None else kept[place] for place in self._place]
        waiting, rare = self._turn_back.rebuild(weights, stacked)
        tasks = self._tasks(weights)
        tasks.waiting = {key: self._traced.waiting[key].holding(values) for key, values in waiting.items()}
        tasks.rare.hold(rare, self._traced.rare)
        run(self._down_w, tasks, self._sums(tasks))
        return self._gradients(tasks)

    def _input_gradient(
        self, given: tuple[jax.Array, list[jax.Array]], weights: dict[int, Tree]
    ) -> tuple[jax.Array, None, Any]:
        tasks = self._traced = self._run_down(self._down_b, given[0], weights, given[1])
        held = {key: pullback.held() for key, pullback in tasks.waiting.items()}
        return self._joined(tasks.dx), None, (held, tasks.rare.held())

    def _run_down(
        self, actions: Sequence[Action], dx_bND: jax.Array, weights: dict[int, Tree], kept: Sequence[jax.Array]
    ) -> Tasks:
        """Backward tasks, from the gradient of what is behind the chunk."""
        saved: _Saved = self._turn.rebuild(weights, kept)
        tasks = self._tasks(weights)
        tasks.pullbacks, tasks.rare.overflows = saved.pullbacks, saved.overflows
        tasks.widths = self._widths
        tasks.share = lambda block: saved.share_mE[self._moe.index(block)]
        tasks.dx = dict(enumerate(jnp.split(dx_bND, len(self._microbatches))))
        for r in reversed(self._microbatches):
            tasks.settle_back(r, self._num_blocks)
        run(actions, tasks, self._sums(tasks))
        return tasks

    def _forward(self, x_bND: jax.Array, weights: dict[int, Tree]) -> tuple[jax.Array, Parts | None, _Saved]:
        tasks = self._tasks(weights)
        tasks.x = dict(enumerate(jnp.split(x_bND, len(self._microbatches))))
        sums = self._sums(tasks)
        run(self._up, tasks, sums)
        for r in self._microbatches:
            tasks.settle(r, self._num_blocks)
        self._widths = tasks.widths
        stats: RouterStats | None = sums.stats()
        parts = None
        if stats is not None:
            parts = parts_of(jnp.float32(0), stats, sums.count_ME, self.facts.global_tokens)
        x_bND = self._joined(tasks.x)
        saved = _Saved(tasks.pullbacks, tasks.rare.overflows, sums.share_ME if self._moe else None, x_bND)
        return x_bND, parts, saved

    def _joined(self, parts: dict[int, jax.Array]) -> jax.Array:
        return jnp.concatenate([parts[r] for r in self._microbatches])

    def _gradients(self, tasks: Tasks) -> list[Tree]:
        sums = self._sums(tasks)
        return [sums.own(block + 1) for block in range(self._num_blocks)]

    def _tasks(self, weights: dict[int, Tree]) -> Tasks:
        return Tasks(self.facts, None, weights, None)

    def _sums(self, tasks: Tasks) -> Sums:
        nothing = Reduction(vectors=(), chunks=())
        return Sums((nothing,) * (self._num_blocks + 2), tasks, None)
