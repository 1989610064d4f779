"""Multi-token prediction (DeepSeek-V3 2024, section 2.2): a module of depth 1 predicts the token after the next one.

The features of token i after the decoder's last norm and the embedding of token i + 1 are normed, joined and projected;
one further block with experts and a norm of its own follow. The embedding and the head are those of the decoder. As in
DeepSeek's checkpoints the embedding comes first, and as in the programs that serve them the decoder's last norm is
applied to the features before the module's.

B sequences of this device, of which it has n tokens each; D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.config.sections import TrainConfig
from moe_jax.models.head import HeadLoss, LossForm, head_loss
from moe_jax.models.layers import matmul, norm
from moe_jax.parallel.trees import Tree


class MTPInputs(NamedTuple):
    """What multi-token prediction reads besides features, and the weight of its loss."""

    next_Bn: Int[Array, "B n"]  # the token after each one
    target_Bn: Int[Array, "B n"]  # the token after that; NO_TARGET where the loss does not count it
    divisor: int | Int[Array, ""]  # the number of targets of the global batch that the loss counts, at least 1
    scale: Float[Array, ""]  # the weight of the loss in this step

    def parts(self, count: int) -> list["MTPInputs"]:
        """Split the sequences into `count` equal parts."""
        tokens = zip(jnp.split(self.next_Bn, count), jnp.split(self.target_Bn, count), strict=True)
        return [self._replace(next_Bn=next_bn, target_Bn=target_bn) for next_bn, target_bn in tokens]


def mtp_scale(train: TrainConfig, steps_done: Int[Array, ""]) -> Float[Array, ""]:
    """Return the weight of the loss in the step after so many."""
    first_step, scale = zip((1, train.mtp_loss_scaling_factor), *train.mtp_loss_schedule, strict=True)
    entry = jnp.searchsorted(jnp.asarray(first_step, jnp.int32), steps_done + 1, side="right") - 1
    return jnp.asarray(scale, jnp.float32)[entry]


@jax.named_scope("mtp_input")
def mtp_input(
    params: Tree,
    x_BnD: Float[Array, "B n D"],
    *,
    norm_D: Float[Array, " D"],
    next_BnD: Float[Array, "B n D"],
    model: ModelConfig,
) -> Float[Array, "B n D"]:
    """Return the input of the block, from the residual stream after the decoder's last block.

    `norm_D` is the decoder's last norm, and `next_BnD` has the embedding of the token after each one.
    """
    features_BnD = norm(norm(x_BnD, norm_D, model), params["hidden_norm"], model)
    embedding_BnD = norm(next_BnD, params["embedding_norm"], model)
    joined = jnp.concatenate([embedding_BnD, features_BnD], axis=-1)
    return matmul(joined, params["projection"])


def after_mtp_input(run: Callable[..., Any], model: ModelConfig) -> Callable[..., Any]:
    """Return a function like `run(weights, x)`, which runs a block, for the block of multi-token prediction.

    Its weights have the decoder's last norm besides the block's own; instead of x it takes the residual stream after
    the decoder's last block and the embeddings of next tokens.
    """

    def with_input(weights: Tree, inputs: tuple[jax.Array, jax.Array]) -> Any:
        x_BnD, next_BnD = inputs
        norm_D, own = weights["last_norm"], weights["mtp_input"]
        return run(weights, mtp_input(own, x_BnD, norm_D=norm_D, next_BnD=next_BnD, model=model))

    return with_input


@jax.named_scope("head")
def decoder_loss(
    params: Tree,
    x_BnD: Float[Array, "B n D"],
    target_Bn: Int[Array, "B n"],
    divisor: int | Int[Array, ""],
    model: ModelConfig,
    loss_chunk: int | None,
    form: LossForm,
    mtp_BnD: Float[Array, "B n D"] | None = None,
    mtp: MTPInputs | None = None,
) -> HeadLoss:
    """Return this device's share of the mean loss of the global batch, which counts `divisor` targets.

    With `mtp` the weighted loss of multi-token prediction is added, from the residual stream `mtp_BnD` after its block.
    """
    sums = head_loss(params, x_BnD, target_Bn, model, loss_chunk, form._replace(has_mtp=False))
    own = jax.tree.map(lambda total: total / divisor, sums)
    if mtp is None or mtp_BnD is None:
        return own
    params = params | {"norm": params["mtp_norm"]}
    mtp_loss = head_loss(params, mtp_BnD, mtp.target_Bn, model, loss_chunk, LossForm()).total / mtp.divisor
    return HeadLoss(own.total + mtp.scale * mtp_loss, own.terms._replace(mtp_loss=mtp_loss))
