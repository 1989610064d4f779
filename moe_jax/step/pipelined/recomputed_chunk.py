"""A model chunk whose backward pass recomputes its forward pass, exchanges included (`schedule.remat=chunk`).

Between the two passes only the chunk's input and output are stored, and no rows of other devices. The residuals of its
blocks exist only during the backward pass.
"""

from collections.abc import Sequence

import jax

from moe_jax.parallel.ordering import depend_on
from moe_jax.step.pipelined.buffer_reuse import BufferSlot
from moe_jax.step.pipelined.model_chunk import Backward, ForwardResult, InputGradient, ModelChunk
from moe_jax.step.scheduled.scan_residuals import BlockConsts
from moe_jax.step.scheduled.step_dims import StepDims


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
