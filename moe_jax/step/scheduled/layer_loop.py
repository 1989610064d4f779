"""Loops over equal groups of blocks: `lax.scan` runs the turns of a schedule, forward and backward.

A forward turn hands the settled residual stream on and stacks what its pullbacks keep. A backward turn makes its
pullbacks again, runs its tasks, and sums the gradients of the turn above.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.layer_layout import Segment
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.parallel.trees import Tree
from moe_jax.schedule.actions import Action, is_reduction
from moe_jax.schedule.scanned import ScannedSchedule
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop_grads import StackLayout, TurnGradients
from moe_jax.step.scheduled.scan_residuals import Given, ScanBody


def run(actions: Iterable[Action], tasks: Tasks, sums: GradientReducer) -> None:
    """Issue tasks in order."""
    runs = {"F": tasks.forward, "B": tasks.backward, "W": tasks.weights, "G": sums.run}
    for action in actions:
        with jax.named_scope(str(action)):
            runs[action.direction](action)


class Stacked(NamedTuple):
    """What each turn takes its share of. The first three are the looped segment's, by place in its period."""

    params: Tree
    cuts: Tree  # of its parameters
    earlier: Tree | None  # gradients that are added to those of the turns
    router_inputs: RouterInputs | None  # what gates look at besides features, below the blocks
    slot_ME: jax.Array | None  # where the experts of all blocks lie; None: in their order


class LayerScan:
    """The loops of a step over the turns of a segment. `sums` and its tasks run what lies outside of them."""

    def __init__(self, looped: ScannedSchedule, segment: Segment, sums: GradientReducer, stacked: Stacked):
        self.looped, self.turns = looped, looped.blocks
        self.sums, self.tasks = sums, sums.tasks
        self.params, self.cuts, self.earlier, self.router_inputs, self.slot_ME = stacked
        self.layout = StackLayout(self.turns, len(segment.kinds))
        self.microbatches = range(self.tasks.facts.microbatches)
        self.gradients: TurnGradients
        self.moe = [b for b in self._blocks if self.tasks.facts.shape.kinds[b] == "moe"]

    @property
    def _blocks(self) -> range:
        """Those of turn 0, whose names all turns have inside a loop."""
        return range(self.turns.first, self.turns.first + self.turns.size)

    def _given(self, turn: int | jax.Array) -> Given:
        weights = {block: self.layout.take(self.params, turn, block) for block in self._blocks}
        slots = {} if self.slot_ME is None else {b: self._of_moe_block(self.slot_ME, turn, b) for b in self.moe}
        return Given(weights, self.router_inputs and self.router_inputs.above(turn * self.turns.size), slots)

    def up(self) -> None:
        """Run the forward turns."""
        for r in self.microbatches:
            self.tasks.settle(r, self.turns.first)

        def turn(x: list[jax.Array], given: Given) -> tuple[Tree, Tree, Tree]:
            tasks = Tasks(self.tasks.facts, None, given)
            tasks.x = dict(zip(self.microbatches, x, strict=True))
            run(self.looped.forward_body, tasks, self.sums)
            for r in self.microbatches:
                tasks.settle(r, self.turns.first + self.turns.size)
            self.tasks.widths = tasks.widths
            of_block = ([tasks.stats[block, r] for r in self.microbatches] for block in self.moe)
            stats = [jax.tree.map(lambda *parts: sum(parts), *parts) for parts in of_block]
            results = stats, tasks.ties.end_of_turn()
            return [tasks.x[r] for r in self.microbatches], results, (tasks.pullbacks, tasks.rare.overflows)

        x = [self.tasks.x[r] for r in self.microbatches]
        given = jax.eval_shape(lambda: self._given(0))
        self.turn = ScanBody(turn, jax.eval_shape(lambda: x), given)

        def step(x: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], tuple[Tree, Tree]]:
            x, results, kept = self.turn(x, self._given(number))
            return x, (results, kept)

        numbers = self.tasks.ties.into_loop(jnp.arange(self.turns.count))
        x, ((stats, ends), self.kept) = jax.lax.scan(step, x, numbers)
        self.tasks.ties.out_of_loop(ends)
        self.tasks.x = dict(zip(self.microbatches, x, strict=True))
        if self.moe:
            in_order = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *stats)
            self.sums.stats_of_turns[self.turns.first] = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), in_order
            )
        highest = self.turns.count - 1
        self._restore(self.tasks, highest, self._given(highest), highest * self.turns.size)

    def _restore(self, tasks: Tasks, turn: int | jax.Array, given: Given, shift: int = 0) -> None:
        """Give tasks what a forward turn kept; blocks' numbers grow by `shift`."""
        kept = [jax.lax.dynamic_index_in_dim(leaf, turn, keepdims=False) for leaf in self.kept]
        pullbacks, overflows = self.turn.rebuild(given, kept)
        tasks.pullbacks |= {(op, block + shift, part): pull for (op, block, part), pull in pullbacks.items()}
        tasks.rare.overflows |= {(block + shift, part): rows for (block, part), rows in overflows.items()}
        tasks.widths = self.tasks.widths

    def down(self) -> None:
        """Run the backward turns below the highest, whose backward pass has been run."""
        highest = self.turns.count - 1
        self.gradients = TurnGradients(
            self.layout, self.cuts, self.params, self.turns.count if self.looped.reduction_body else 1
        )
        for block in self._blocks:
            self.gradients.put(highest, block, self.sums.own(block + highest * self.turns.size + 1))
        late = any(map(is_reduction, self.looped.backward_body))
        share_ME = self.sums.share_ME if self.moe else None  # not first of all inside the loop

        def step(carry: tuple[list[jax.Array], Tree], number: jax.Array) -> tuple[tuple[list[jax.Array], Tree], Tree]:
            dx, self.gradients.state = carry
            given = self._given(number)
            tasks = Tasks(self.tasks.facts, None, Given(given.blocks))
            self._restore(tasks, number, given)
            sums = GradientReducer(self.sums.reductions, tasks, self._earlier(number))
            if share_ME is not None:
                tasks.share = partial(self._of_moe_block, share_ME, number)
            tasks.dx = dict(zip(self.microbatches, dx, strict=True))
            if late:
                self._take(sums, number + 1, self.turns.size)
            for r in reversed(self.microbatches):
                tasks.settle_back(r, self.turns.first + self.turns.size)
            run(self.looped.backward_body, tasks, sums)
            if late:
                self._put_totals(sums, number + 1, self.turns.size)
            for block in self._blocks:
                self.gradients.put(number, block, sums.own(block + 1))
            return ([tasks.dx[r] for r in self.microbatches], self.gradients.state), tasks.ties.end_of_turn()

        dx = [self.tasks.dx[r] for r in self.microbatches]
        numbers = self.tasks.ties.into_loop(jnp.arange(highest))
        (dx, self.gradients.state), ends = jax.lax.scan(step, (dx, self.gradients.state), numbers, reverse=True)
        self.tasks.ties.out_of_loop(ends)
        self.tasks.dx = dict(zip(self.microbatches, dx, strict=True))
        for r in reversed(self.microbatches):
            self.tasks.settle_back(r, self.turns.first)
        self._take(self.sums, 0)

    def reduce(self) -> None:
        """Run the reductions behind the backward pass."""
        if not self.looped.reduction_body:
            self._put_totals(self.sums, 0)
            return

        def step(state: Tree, number: jax.Array) -> tuple[Tree, Tree]:
            self.gradients.state = state
            sums = GradientReducer(self.sums.reductions, Tasks(self.tasks.facts, None, Given({})), None)
            self._take(sums, number)
            run(self.looped.reduction_body, sums.tasks, sums)
            self._put_totals(sums, number)
            return self.gradients.state, sums.tasks.ties.end_of_turn()

        numbers = self.tasks.ties.into_loop(jnp.arange(self.turns.count))
        self.gradients.state, ends = jax.lax.scan(step, self.gradients.state, numbers, reverse=True)
        self.tasks.ties.out_of_loop(ends)

    def _take(self, sums: GradientReducer, turn: int | jax.Array, shift: int = 0) -> None:
        """Hand gradients of a turn to the sums."""
        for block in self._blocks:
            sums.from_turns[block + shift + 1] = self.gradients.take(turn, block)

    def _put_totals(self, sums: GradientReducer, turn: int | jax.Array, shift: int = 0) -> None:
        for block in self._blocks:
            owner = block + shift + 1
            self.gradients.put_sum(turn, block, sums.total(owner), sums.from_turns[owner])

    def _earlier(self, turn: jax.Array) -> Callable[[int], Tree] | None:
        if self.earlier is None:
            return None
        return lambda owner: self.layout.take(self.earlier, turn, owner - 1)

    def _of_moe_block(self, of_all_M: jax.Array, turn: int | jax.Array, block: int) -> jax.Array:
        """What belongs to a block of a turn."""
        below = self.tasks.facts.shape.kinds[: self.turns.first].count("moe")
        place = below + turn * len(self.moe) + self.moe.index(block)
        return jax.lax.dynamic_index_in_dim(of_all_M, place, keepdims=False)
