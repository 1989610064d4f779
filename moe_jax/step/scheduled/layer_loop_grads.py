"""Gradients of the blocks in a scan, stacked like the parameters; every iteration updates them in place.

With ZeRO, the stack only has this device's shard: the whole gradient waits in a separate array until it is summed.
"""

import copy
from typing import NamedTuple

import jax

from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ranks_of
from moe_jax.schedule.scanned import ScannedBlocks

Leaves = dict[int, dict[int, jax.Array]]  # by place in a period, then leaf number in the tree of a block
GradientArrays = tuple[Leaves, Leaves]  # gradients, and whole gradients that wait for their sum


class StackLayout(NamedTuple):
    """The positions of scanned blocks in a segment's stacked arrays. Blocks are numbered as in iteration 0."""

    scan_blocks: ScannedBlocks
    period: int  # blocks in a period

    @property
    def blocks(self) -> range:
        """The blocks of iteration 0."""
        return range(self.scan_blocks.first, self.scan_blocks.first + self.scan_blocks.size)

    @property
    def unroll(self) -> int:
        """Periods in one iteration."""
        return self.scan_blocks.size // self.period

    def place_in_period(self, block: int) -> int:
        """Return the place of a block in its period."""
        return self.place(0, block)[1]

    def place(self, iteration: int | jax.Array, block: int) -> tuple[int | jax.Array, int]:
        """Return the period of a block, and its place in the period."""
        period, place = divmod(block - self.scan_blocks.first, self.period)
        return iteration * self.unroll + period, place

    def take(self, tree: Tree, iteration: int | jax.Array, block: int) -> Tree:
        """Return the share of one block of a stacked tree."""
        period, place = self.place(iteration, block)
        return jax.tree.map(lambda leaf: _get(leaf, period), tree[place])


class LoopGradients:
    """Stacked gradients. `shard_specs` are those of the scanned segment's parameters, by place in its period."""

    def __init__(
        self, layout: StackLayout, shard_specs: Tree, params: Tree, waiting_iterations: int, sharded: bool = False
    ):
        """Allocate gradients of `params`, which are shards if `sharded`. Sharded gradients wait for their sum in
        `waiting_iterations` iterations at a time.
        """
        self.layout, self._keeps_all = layout, waiting_iterations > 1
        self._shard_specs = {place: jax.tree.leaves(tree) for place, tree in shard_specs.items()}
        self._structures = {place: jax.tree.structure(tree) for place, tree in params.items()}
        self._sums: Leaves = {}
        self._waiting: Leaves = {}
        for place, tree in params.items():
            leaves = list(enumerate(zip(jax.tree.leaves(tree), self._shard_specs[place], strict=True)))
            whole = {
                i: shard_spec.whole_shape(leaf.shape) if sharded else leaf.shape for i, (leaf, shard_spec) in leaves
            }
            shapes = {i: shard_spec.shape(whole[i], ranks_of(shard_spec.axes)) for i, (_, shard_spec) in leaves}
            self._sums[place] = {i: jax.lax.empty(shapes[i], leaf.dtype) for i, (leaf, _) in leaves}
            periods = waiting_iterations * layout.unroll
            self._waiting[place] = {
                i: jax.lax.empty((periods, *whole[i][1:]), leaf.dtype)
                for i, (leaf, shard_spec) in leaves
                if shard_spec.axes
            }

    @property
    def arrays(self) -> GradientArrays:
        """All arrays, for the carry of a scan."""
        return self._sums, self._waiting

    def with_arrays(self, arrays: GradientArrays) -> "LoopGradients":
        """Return the same gradients with the arrays of a scan's carry."""
        other = copy.copy(self)
        other._sums, other._waiting = arrays
        return other

    def tree(self) -> Tree:
        """Return the gradients in the layout of the parameters."""
        return {
            place: jax.tree.unflatten(structure, self._sums[place].values())
            for place, structure in self._structures.items()
        }

    def put(self, iteration: int | jax.Array, block: int, gradient: Tree) -> None:
        """Set this device's gradient of one block."""
        period, place = self.layout.place(iteration, block)
        waiting = self._waiting_index(iteration, block)
        for i, new in enumerate(jax.tree.leaves(gradient)):
            if i in self._waiting[place]:
                self._waiting[place][i] = _set(self._waiting[place][i], new, waiting)
            else:
                self._sums[place][i] = _set(self._sums[place][i], new, period)

    def take(self, iteration: int | jax.Array, block: int) -> Tree:
        """Return the gradient that `put` stored."""
        period, place = self.layout.place(iteration, block)
        waiting = self._waiting_index(iteration, block)
        leaves = [_get(leaf, period) for leaf in self._sums[place].values()]
        for i, leaf in self._waiting[place].items():
            leaves[i] = _get(leaf, waiting)
        return jax.tree.unflatten(self._structures[place], leaves)

    def put_sum(self, iteration: int | jax.Array, block: int, total: Tree, before: Tree = None) -> None:
        """Set the gradient after its sum over devices; leaves identical to those of `before` are already stored."""
        period, place = self.layout.place(iteration, block)
        known = set(map(id, jax.tree.leaves(before)))
        for i, new in enumerate(jax.tree.leaves(total)):
            if id(new) not in known:
                self._sums[place][i] = _set(self._sums[place][i], new, period)

    def _waiting_index(self, iteration: int | jax.Array, block: int) -> int | jax.Array:
        return self.layout.place(iteration if self._keeps_all else 0, block)[0]


def _get(leaf: jax.Array, period: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, period, keepdims=False)


def _set(leaf: jax.Array, new: jax.Array, period: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, new, period, axis=0)
