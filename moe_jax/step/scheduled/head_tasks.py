"""The tasks of the head: the loss of each microbatch, and its gradients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from moe_jax.models.head import Head, HeadLoss, LossForm, head_loss_onto, is_in_chunks, no_loss
from moe_jax.models.mtp import MTPInputs, decoder_loss
from moe_jax.parallel.sequence_shards import LocalTokens
from moe_jax.parallel.trees import OF_HEAD, Tree
from moe_jax.step.scheduled.pullbacks import Pullbacks
from moe_jax.step.scheduled.step_dims import StepDims


class HeadTasks:
    """Runs the head's tasks of all microbatches. `ends` holds its parameters when it runs.

    If the loss is computed in chunks, forward tasks compute the head's gradients, each of which is as large as the
    head, in float32. Each microbatch adds its own to those of the microbatches before it, and the backward task of the
    last one returns the sum.
    """

    def __init__(
        self,
        dims: StepDims,
        ends: Mapping[str, Tree],
        tokens: Sequence[LocalTokens],
        mtp: Sequence[MTPInputs | None],
        pullbacks: Pullbacks,
    ):
        self.form = LossForm.of(dims.config)
        self.losses = no_loss(self.form)  # of the microbatches that have run
        self._dims, self._ends, self._tokens, self._mtp, self._pullbacks = dims, ends, tokens, mtp, pullbacks
        self._sums: Head | None = None  # the head's gradients, of these microbatches
        self._num_left = dims.microbatches
        self._last = -1  # the microbatch that has run last

    def without_mtp(self) -> None:
        """Leave multi-token prediction out of the loss."""
        self.form = self.form._replace(has_mtp=False)
        self.losses = no_loss(self.form)

    def forward(self, block: int, r: int, x: Sequence[jax.Array]) -> jax.Array:
        """Return the loss of microbatch r. `x` is its residual stream, after that of the decoder if a module for
        multi-token prediction follows.
        """
        config, self._num_left, self._last = self._dims.config, self._num_left - 1, r
        names = (*OF_HEAD, "embedding") if config.model.tie_word_embeddings else OF_HEAD
        weights = {name: self._ends[name] for name in names if name in self._ends}

        def differentiated(share: Callable[..., Tree]) -> Tree:
            return self._pullbacks.differentiate(("head", block, r), partial(share, r=r), weights, x)

        if self._adds_gradients(r):
            onto = partial(self._share_onto, so_far=self._sums, is_last=self._num_left == 0)
            loss, self._sums = differentiated(onto)
        else:
            loss = differentiated(self._share)
        self.losses = jax.tree.map(jnp.add, self.losses, loss.terms)
        total: jax.Array = loss.total
        return total

    def backward(self, block: int, r: int, d_loss: jax.Array) -> list[jax.Array]:
        """Return the gradients of what `forward` was given, for the cotangent of the loss."""
        cotangents = jax.tree.leaves(HeadLoss.cotangent(d_loss, self.form))
        if self._adds_gradients(r):
            cotangents += jax.tree.leaves(jax.tree.map(jnp.zeros_like, self._sums))  # which nothing reads
        return self._pullbacks.pull(("head", block, r), cotangents)

    def returns_gradients(self, r: int) -> bool:
        """Return whether microbatch r returns gradients of the head, or only adds them up."""
        return not self._adds_gradients(r) or r == self._last

    def _adds_gradients(self, r: int) -> bool:
        model, loss_chunk = self._dims.config.model, self._dims.compute.loss_chunk
        has_chunks = is_in_chunks(self._tokens[r].target_Bn, model, loss_chunk)
        return has_chunks and self._dims.microbatches > 1 and not self._dims.shape.mtp

    def _share(self, weights: Tree, x: Sequence[jax.Array], r: int) -> HeadLoss:
        """This device's share of the mean loss of the global batch."""
        target_Bn, mtp_BnD = self._tokens[r].target_Bn, x[1] if len(x) > 1 else None
        sizes = self._dims.loss_divisor, self._dims.config.model, self._dims.compute.loss_chunk
        return decoder_loss(weights, x[0], target_Bn, *sizes, self.form, mtp_BnD, self._mtp[r])

    @jax.named_scope("head")
    def _share_onto(
        self, weights: Tree, x: Sequence[jax.Array], r: int, so_far: Head | None, is_last: bool
    ) -> tuple[HeadLoss, Head]:
        """The same, with the head's gradients of the microbatches up to this one."""
        target_Bn, compute = self._tokens[r].target_Bn, self._dims.compute
        model, form = self._dims.config.model, self.form
        loss, sums = head_loss_onto(weights, x[0], target_Bn, model, compute.loss_chunk, form, so_far, is_last)
        return jax.tree.map(lambda total: total / self._dims.loss_divisor, loss), sums
