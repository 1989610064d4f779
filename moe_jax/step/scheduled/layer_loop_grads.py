"""Gradients of the turns of a loop over blocks, stacked like the parameters; every turn changes them in place.

Only a part of what is cut over devices (ZeRO) has a place there: until it is summed, the whole of it waits apart.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ranks_of
from moe_jax.schedule.scanned import ScannedBlocks

Leaves = dict[int, dict[int, jax.Array]]  # by place in a period, then number of the leaf in the tree of a block


class StackLayout(NamedTuple):
    """Where the blocks of turns lie in a segment's stacked arrays. Blocks are counted from turn 0."""

    turns: ScannedBlocks
    period: int  # blocks of one

    @property
    def unroll(self) -> int:
        """Periods of a turn."""
        return self.turns.size // self.period

    def place(self, turn: int | jax.Array, block: int) -> tuple[int | jax.Array, int]:
        """Period of a block, and its place in it."""
        period, place = divmod(block - self.turns.first, self.period)
        return turn * self.unroll + period, place

    def take(self, tree: Tree, turn: int | jax.Array, block: int) -> Tree:
        """The share of one block of a stacked tree."""
        period, place = self.place(turn, block)
        return jax.tree.map(lambda leaf: _get(leaf, period), tree[place])


class TurnGradients:
    """`cuts` are those of the looped segment's parameters, by place in its period."""

    def __init__(self, layout: StackLayout, cuts: Tree, params: Tree, waiting_turns: int):
        """Zeros for gradients of `params`, which are whole. What is cut waits in `waiting_turns` turns at once."""
        self.layout, self._keeps_all = layout, waiting_turns > 1
        self._cuts = {place: jax.tree.leaves(tree) for place, tree in cuts.items()}
        self._structures = {place: jax.tree.structure(tree) for place, tree in params.items()}
        self._sums: Leaves = {}
        self._waiting: Leaves = {}
        for place, tree in params.items():
            leaves = list(enumerate(zip(jax.tree.leaves(tree), self._cuts[place], strict=True)))
            shapes = {i: cut.shape(leaf.shape, ranks_of(cut.axes)) for i, (leaf, cut) in leaves}
            self._sums[place] = {i: jnp.zeros(shapes[i], leaf.dtype) for i, (leaf, _) in leaves}
            periods = waiting_turns * layout.unroll
            self._waiting[place] = {
                i: jnp.zeros((periods, *leaf.shape[1:]), leaf.dtype) for i, (leaf, cut) in leaves if cut.axes
            }

    @property
    def state(self) -> tuple[Leaves, Leaves]:
        """All arrays, for a loop to carry."""
        return self._sums, self._waiting

    @state.setter
    def state(self, state: tuple[Leaves, Leaves]) -> None:
        self._sums, self._waiting = state

    def tree(self) -> Tree:
        """Gradients laid out like the parameters."""
        return {
            place: jax.tree.unflatten(structure, self._sums[place].values())
            for place, structure in self._structures.items()
        }

    def put(self, turn: int | jax.Array, block: int, gradient: Tree) -> None:
        """Set the gradient of one block, as this device has it."""
        period, place = self.layout.place(turn, block)
        waiting = self._waiting_index(turn, block)
        for i, new in enumerate(jax.tree.leaves(gradient)):
            if i in self._waiting[place]:
                self._waiting[place][i] = _set(self._waiting[place][i], new, waiting)
            else:
                self._sums[place][i] = _set(self._sums[place][i], new, period)

    def take(self, turn: int | jax.Array, block: int) -> Tree:
        """The gradient that was put."""
        period, place = self.layout.place(turn, block)
        waiting = self._waiting_index(turn, block)
        leaves = [_get(leaf, period) for leaf in self._sums[place].values()]
        for i, leaf in self._waiting[place].items():
            leaves[i] = _get(leaf, waiting)
        return jax.tree.unflatten(self._structures[place], leaves)

    def put_sum(self, turn: int | jax.Array, block: int, total: Tree, before: Tree = None) -> None:
        """Set what it came to over devices; leaves that are those of `before` are in their place already."""
        period, place = self.layout.place(turn, block)
        known = set(map(id, jax.tree.leaves(before)))
        for i, new in enumerate(jax.tree.leaves(total)):
            if id(new) not in known:
                self._sums[place][i] = _set(self._sums[place][i], new, period)

    def _waiting_index(self, turn: int | jax.Array, block: int) -> int | jax.Array:
        return self.layout.place(turn if self._keeps_all else 0, block)[0]


def _get(leaf: jax.Array, period: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, period, keepdims=False)


def _set(leaf: jax.Array, new: jax.Array, period: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, new, period, axis=0)
