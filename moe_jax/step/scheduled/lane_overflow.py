"""The state of a step for ragged exchanges: casts of each block's expert weights to the type that a product needs, and
rows that do not fit into their expert's lane (see `models.dispatchers.ragged.Overflow`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from moe_jax.models.dispatchers.protocol import RowSource
from moe_jax.models.dispatchers.ragged import Overflow, Rest, Stored
from moe_jax.parallel.all_to_all import ragged
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


class OverflowResiduals(NamedTuple):
    """What the weight gradients of one block and piece need of its overflowed rows."""

    overflow: Overflow
    rows_R: jax.Array
    d_rest_R: jax.Array


class LaneOverflow:
    """The values that tasks pass on for overflowed rows, by block and piece."""

    def __init__(self, dims: StepDims, weights: ExpertWeights):
        self._dims, self._weights, self._moe = dims, weights, dims.config.model.moe
        self.overflows: dict[tuple[int, int], Overflow] = {}
        self._sources: dict[int, RowSource] = {}  # by piece in flight
        self._rest: dict[tuple[int, int], Rest] = {}  # for the backward pass
        self._d_rest: dict[tuple[int, int], jax.Array] = {}

    def sent(self, p: int, source: RowSource) -> None:
        """Record the source of a piece's rows."""
        self._sources[p] = source

    def forward(self, block: int, p: int, lanes: ragged.Lanes, filled_L: jax.Array) -> jax.Array:
        """Return the experts' outputs for the overflowed rows."""
        overflow = self.overflows[block, p] = Overflow.of(self._sources.pop(p), lanes, filled_L)
        rest = Rest(lanes.rest_R, lanes.main_LbD.shape[1])
        if block == self._dims.last_moe:  # its backward pass is next
            self._rest[block, p] = rest
        return overflow.forward(self._weights.stored(block), rest, self._moe)

    def count_PE(self, block: int, p: int) -> jax.Array:
        """Return how many rows each rank sent to each expert."""
        return self.overflows[block, p].count_PE

    def send_again(self, block: int, p: int, after_comm: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
        """Send the overflowed rows to their experts' rank again for the backward pass, and return them if that took an
        exchange.

        `after_comm` orders the exchange after the previous one.
        """
        if (block, p) in self._rest:
            return None
        overflow, compute = self.overflows[block, p], self._dims.compute
        widths = self._dims.ragged_exchange.widths
        rows = ragged.rest_lanes(
            after_comm(overflow.sent()), overflow.count_PE, widths, compute.expert_axis, compute.platform
        )
        self._rest[block, p] = Rest(rows, widths.main)
        return rows if rows.size else None

    def backward(self, block: int, p: int, d_rest_R: jax.Array) -> jax.Array:
        """Return the gradient of the overflowed rows."""
        self._d_rest[block, p] = d_rest_R
        weights, rest = self._weights.stored(block), self._rest[block, p]
        return self.overflows[block, p].backward(weights, rest, d_rest_R, self._moe)

    def residuals(self) -> dict[tuple[int, int], OverflowResiduals]:
        """Return the arrays that `add_weights` reads, for all pieces whose backward pass has run."""
        return {
            key: OverflowResiduals(self.overflows[key], self._rest[key].rows_R, d_rest)
            for key, d_rest in self._d_rest.items()
        }

    def restore(self, residuals: dict[tuple[int, int], OverflowResiduals], other: "LaneOverflow") -> None:
        """Continue in another trace with the residuals of `other`."""
        for key, (overflow, rows_R, d_rest_R) in residuals.items():
            self.overflows[key], self._d_rest[key] = overflow, d_rest_R
            self._rest[key] = other._rest[key]._replace(rows_R=rows_R)

    def add_weights(self, block: int, gradient: Tree) -> Tree:
        """Add the overflowed rows' part to the gradient of a block's experts, for all pieces whose backward pass has
        run.
        """
        for key in [key for key in self._d_rest if key[0] == block]:
            gradient = self.overflows.pop(key).add_weights(
                gradient, self._weights.stored(block), self._rest.pop(key), self._d_rest.pop(key), self._moe
            )
        return gradient
