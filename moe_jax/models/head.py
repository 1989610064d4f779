"""The final norm, the output head, and its loss, computed at once or one chunk of tokens after another.

The loss is the cross-entropy, and the z-loss of the logits if it has a weight (PaLM, Chowdhery et al. 2022, section 5).

B sequences of this device, of which it has n tokens each, T = B·n; K chunks of c tokens; D model width, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.models.layers import rms_norm, wide_matmul
from moe_jax.parallel.trees import Tree

_SCOPE = "cross_entropy"
NO_TARGET = -1  # a token whose prediction is not counted, or that pads the last chunk
_Gradients = tuple[jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


class LossTerms(NamedTuple):
    """The terms of the head's loss, each a sum over tokens. They are not differentiated."""

    cross_entropy: Float[Array, ""]  # nats
    z_loss: Float[Array, ""] | None  # squared log-sum-exp of the logits; None: it has no weight


class HeadLoss(NamedTuple):
    """The head's loss, summed over tokens."""

    total: Float[Array, ""]  # cross-entropy + z_loss_multiplier · z-loss: what is differentiated
    split: LossTerms | None  # None: the total is the cross-entropy

    @property
    def terms(self) -> LossTerms:
        """The terms, also if there is only one."""
        return LossTerms(self.total, None) if self.split is None else self.split

    @classmethod
    def cotangent(cls, d_total: Float[Array, ""], z_loss_multiplier: float) -> "HeadLoss":
        """Return the cotangent of a loss of which only the total is differentiated."""
        return cls(d_total, no_loss(z_loss_multiplier) if z_loss_multiplier else None)


def unembed(params: Tree, x_BnD: Float[Array, "B n D"], model: ModelConfig) -> Float[Array, "B n V"]:
    """Return logits in float32."""
    return wide_matmul(rms_norm(x_BnD, params["norm"], model.rms_norm_eps), _matrix(params, model))


def head_loss(
    params: Tree,
    x_BnD: Float[Array, "B n D"],
    target_Bn: Int[Array, "B n"],
    model: ModelConfig,
    loss_chunk: int | None,
    z_loss_multiplier: float,
) -> HeadLoss:
    """Return the loss of all tokens whose target is not NO_TARGET.

    `loss_chunk` and `z_loss_multiplier` are the settings of the config.
    """
    h_TD = rms_norm(x_BnD, params["norm"], model.rms_norm_eps).reshape(-1, model.hidden_size)
    matrix = _matrix(params, model)
    chunk = tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk)
    if chunk == target_Bn.size:
        with jax.named_scope(_SCOPE):
            return _at_once(z_loss_multiplier, h_TD, matrix, target_Bn.ravel())
    padding = -target_Bn.size % chunk
    h_KcD = jnp.pad(h_TD, ((0, padding), (0, 0))).reshape(-1, chunk, model.hidden_size)
    target_Kc = jnp.pad(target_Bn.ravel(), (0, padding), constant_values=NO_TARGET).reshape(-1, chunk)
    with jax.named_scope(_SCOPE):
        return _by_chunks(z_loss_multiplier, h_KcD, matrix, target_Kc)


def _matrix(params: Tree, model: ModelConfig) -> Float[Array, "D V"]:
    matrix: jax.Array = params["embedding"].T if model.tie_word_embeddings else params["head"]
    return matrix


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _at_once(
    z_weight: float, h_TD: Float[Array, "T D"], head_DV: Float[Array, "D V"], target_T: Int[Array, " T"]
) -> HeadLoss:
    """Compute the loss of all tokens at once.

    In differentiation, the exponentials of the logits, and then their gradient, re-use the memory of the logits.
    Autodiff would scatter the part of the target into an array of the same size, and XLA:CPU would copy all of that
    transposed.
    """
    return _at_once_forward(z_weight, h_TD, head_DV, target_T)[0]


def _at_once_forward(
    z_weight: float, h_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array
) -> tuple[HeadLoss, _Residuals]:
    loss_T, lse_T, exp_TV, sum_T = _losses(wide_matmul(h_TD, head_DV), target_T, z_weight)
    return _total(_sums(loss_T, lse_T), z_weight), (h_TD, head_DV, target_T, exp_TV, sum_T, lse_T)


def _at_once_backward(z_weight: float, residuals: _Residuals, d: HeadLoss) -> tuple[jax.Array, jax.Array, None]:
    h_TD, head_DV, target_T, exp_TV, sum_T, lse_T = residuals
    d_logit_TV = (_logit_gradients(exp_TV, sum_T, lse_T, target_T, z_weight) * d.total).astype(h_TD.dtype)
    d_head_DV = wide_matmul(h_TD.T, d_logit_TV).astype(head_DV.dtype)
    return d_logit_TV @ head_DV.astype(h_TD.dtype).T, d_head_DV, None


_at_once.defvjp(_at_once_forward, _at_once_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_chunks(
    z_weight: float, h_KcD: Float[Array, "K c D"], head_DV: Float[Array, "D V"], target_Kc: Int[Array, "K c"]
) -> HeadLoss:
    """Compute the loss chunk by chunk.

    In differentiation, the gradient of a chunk's logits is used as soon as it exists, so no logits are computed twice.
    """
    head = head_DV.astype(h_KcD.dtype)

    def add_chunk(sums: LossTerms, chunk: tuple[jax.Array, jax.Array]) -> tuple[LossTerms, None]:
        h_cD, target_c = chunk
        loss_c, lse_c, _, _ = _losses(wide_matmul(h_cD, head), target_c, z_weight)
        return jax.tree.map(jnp.add, sums, _sums(loss_c, lse_c)), None

    return _total(jax.lax.scan(add_chunk, no_loss(z_weight), (h_KcD, target_Kc))[0], z_weight)


def no_loss(z_loss_multiplier: float) -> LossTerms:
    """Return the terms before any token is added."""
    return LossTerms(jnp.float32(0), jnp.float32(0) if z_loss_multiplier else None)


def _losses(
    logit_cV: Float[Array, "c V"], target_c: Int[Array, " c"], z_weight: float
) -> tuple[Float[Array, " c"], Float[Array, " c"] | None, Float[Array, "c V"], Float[Array, " c"]]:
    """Return cross-entropies, log-sum-exps if the z-loss has a weight, exponentials of the logits minus the largest
    one, and the sums of these exponentials.
    """
    max_c = logit_cV.max(axis=-1)
    exp_cV = jnp.exp(logit_cV - max_c[:, None])
    sum_c = exp_cV.sum(axis=-1)
    lse_c = jnp.log(sum_c) + max_c
    loss_c = lse_c - jnp.take_along_axis(logit_cV, target_c[:, None], axis=-1)[:, 0]
    is_left_out_c = target_c == NO_TARGET
    loss_c = jnp.where(is_left_out_c, 0, loss_c)
    return loss_c, jnp.where(is_left_out_c, 0, lse_c) if z_weight else None, exp_cV, sum_c


def _sums(loss_c: Float[Array, " c"], lse_c: Float[Array, " c"] | None) -> LossTerms:
    return LossTerms(loss_c.sum(), None if lse_c is None else jnp.square(lse_c).sum())


def _total(terms: LossTerms, z_weight: float) -> HeadLoss:
    if terms.z_loss is None:
        return HeadLoss(terms.cross_entropy, None)
    return HeadLoss(terms.cross_entropy + z_weight * terms.z_loss, terms)


def _logit_gradients(
    exp_cV: Float[Array, "c V"],
    sum_c: Float[Array, " c"],
    lse_c: Float[Array, " c"] | None,
    target_c: Int[Array, " c"],
    z_weight: float,
) -> Float[Array, "c V"]:
    """Return the gradient of the total with respect to the logits."""
    factor_c = 1 if lse_c is None else 1 + 2 * z_weight * lse_c  # softmax is the gradient of log-sum-exp, too
    scale_c = jnp.where(target_c == NO_TARGET, 0, factor_c / sum_c)
    return exp_cV * scale_c[:, None] - (jnp.arange(exp_cV.shape[1]) == target_c[:, None])


def _forward(
    z_weight: float, h_KcD: jax.Array, head_DV: jax.Array, target_Kc: jax.Array
) -> tuple[HeadLoss, _Gradients]:
    head = head_DV.astype(h_KcD.dtype)

    def add_chunk(
        sums: tuple[LossTerms, jax.Array], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[LossTerms, jax.Array], jax.Array]:
        (terms, d_head_DV), (h_cD, target_c) = sums, chunk
        loss_c, lse_c, exp_cV, sum_c = _losses(wide_matmul(h_cD, head), target_c, z_weight)
        d_logit_cV = _logit_gradients(exp_cV, sum_c, lse_c, target_c, z_weight).astype(h_cD.dtype)
        terms = jax.tree.map(jnp.add, terms, _sums(loss_c, lse_c))
        return (terms, d_head_DV + wide_matmul(h_cD.T, d_logit_cV)), d_logit_cV @ head.T

    initial = no_loss(z_weight), jnp.zeros(head_DV.shape, jnp.float32)
    (terms, d_head_DV), dh_KcD = jax.lax.scan(add_chunk, initial, (h_KcD, target_Kc))
    return _total(terms, z_weight), (dh_KcD, d_head_DV.astype(head_DV.dtype))


def _backward(z_weight: float, gradients: _Gradients, d: HeadLoss) -> tuple[jax.Array, jax.Array, None]:
    # d.total itself in half precision would scale all by a rounding error
    dh_KcD, d_head_DV = ((each.astype(jnp.float32) * d.total).astype(each.dtype) for each in gradients)
    return dh_KcD, d_head_DV, None


_by_chunks.defvjp(_forward, _backward)
