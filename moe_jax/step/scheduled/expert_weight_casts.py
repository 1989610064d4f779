"""Casts of each block's expert weights to the type that a product needs, for ragged exchanges."""

from collections.abc import Callable, Sequence

import jax

from moe_jax.models.dispatchers.ragged import Stored
from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.step_dims import StepDims


class ExpertWeights:
    """Expert weights by block. `blocks` are parameters by block number; `stored` returns a block's experts in the
    stacked array (None inside a loop).
    """

    def __init__(self, dims: StepDims, blocks: dict[int, Tree], stored: Callable[[int], Stored] | None):
        self._compute, self._blocks = dims.compute, blocks
        # XLA:GPU slices a block's weights out of the stack in every product; storing the casts costs 2 % of the memory.
        self._stored = None if dims.compute.platform == "gpu" else stored
        self._casts: dict[tuple[str, int], Tree] = {}  # by direction and block

    def forward(self, block: int, x: jax.Array) -> Tree:
        """Return the weights for products with `x` in forward tasks."""
        return self._experts(block) if self._stored is None else self._cast("F", block, x)

    def replacements(self, block: int, x: jax.Array) -> Sequence[tuple[jax.Array, jax.Array]]:
        """Return pairs of a value that the forward products saved, and its replacement for backward products with `x`.

        A cast shared by both passes would stay in memory from the forward to the backward pass, for all blocks at once.
        """
        saved = self._casts.get(("F", block))
        if saved is None:
            return []
        new = self._cast("B", block, x)
        return [(saved[name], new[name]) for name in saved if not name.endswith("_bias")]  # products save no biases

    def stored(self, block: int) -> Stored:
        """Return the weights in the form that branches and loops take."""
        if self._stored is not None:
            return self._stored(block)
        weights = self._experts(block)
        if self._compute.platform == "gpu":  # lanes' casts are in memory already; without this, float32 would be sliced
            weights = jax.tree.map(lambda w: w.astype(self._compute.dtype), weights)
        return Stored(jax.tree.map(lambda w: w[None], weights), 0)

    def _experts(self, block: int) -> Tree:
        return self._blocks[block]["moe"]["experts"]

    def _cast(self, direction: str, block: int, x: jax.Array) -> Tree:
        if (direction, block) not in self._casts:
            self._casts[direction, block] = self.stored(block).cast(x)
        return self._casts[direction, block]
