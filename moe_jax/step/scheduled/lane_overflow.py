"""The state of a step for rows that do not fit into their expert's lane: see `models.dispatchers.ragged.Overflow`."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from moe_jax.models.dispatchers.protocol import RowSource
from moe_jax.models.dispatchers.ragged import Overflow, Rest
from moe_jax.parallel.all_to_all import ragged
from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.expert_weight_casts import ExpertWeights
from moe_jax.step.scheduled.step_dims import StepDims


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
