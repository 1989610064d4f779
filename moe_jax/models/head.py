"""The final norm, the output head, and cross-entropy, computed at once or one chunk of tokens after another.

B sequences of this device, of which it has n tokens each, T = B·n; K chunks of c tokens; D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.models.layers import rms_norm, wide_matmul
from moe_jax.parallel.trees import Tree

_SCOPE = "cross_entropy"
_NO_TOKEN = -1  # pads the last chunk
_Gradients = tuple[jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def unembed(params: Tree, x_BnD: Float[Array, "B n D"], model: ModelConfig) -> Float[Array, "B n V"]:
    """Return logits in float32."""
    return wide_matmul(rms_norm(x_BnD, params["norm"], model.rms_norm_eps), _matrix(params, model))


def cross_entropy(
    params: Tree, x_BnD: Float[Array, "B n D"], target_Bn: Int[Array, "B n"], model: ModelConfig, loss_chunk: int | None
) -> Float[Array, ""]:
    """Return the sum of losses over all tokens, in nats. `loss_chunk` is the setting of the config."""
    h_TD = rms_norm(x_BnD, params["norm"], model.rms_norm_eps).reshape(-1, model.hidden_size)
    matrix = _matrix(params, model)
    chunk = tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk)
    if chunk == target_Bn.size:
        with jax.named_scope(_SCOPE):
            return _at_once(h_TD, matrix, target_Bn.ravel())
    padding = -target_Bn.size % chunk
    h_KcD = jnp.pad(h_TD, ((0, padding), (0, 0))).reshape(-1, chunk, model.hidden_size)
    target_Kc = jnp.pad(target_Bn.ravel(), (0, padding), constant_values=_NO_TOKEN).reshape(-1, chunk)
    with jax.named_scope(_SCOPE):
        return _by_chunks(h_KcD, matrix, target_Kc)


def _matrix(params: Tree, model: ModelConfig) -> Float[Array, "D V"]:
    matrix: jax.Array = params["embedding"].T if model.tie_word_embeddings else params["head"]
    return matrix


@jax.custom_vjp
def _at_once(h_TD: Float[Array, "T D"], head_DV: Float[Array, "D V"], target_T: Int[Array, " T"]) -> Float[Array, ""]:
    """Compute the loss of all tokens at once.

    In differentiation, the exponentials of the logits, and then their gradient, re-use the memory of the logits.
    Autodiff would scatter the part of the target into an array of the same size, and XLA:CPU would copy all of that
    transposed.
    """
    return _at_once_forward(h_TD, head_DV, target_T)[0]


def _at_once_forward(h_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array) -> tuple[jax.Array, _Residuals]:
    loss_T, exp_TV, sum_T = _losses(wide_matmul(h_TD, head_DV), target_T)
    return loss_T.sum(), (h_TD, head_DV, target_T, exp_TV, sum_T)


def _at_once_backward(residuals: _Residuals, d_total: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    h_TD, head_DV, target_T, exp_TV, sum_T = residuals
    d_logit_TV = (_logit_gradients(exp_TV, sum_T, target_T) * d_total).astype(h_TD.dtype)
    d_head_DV = wide_matmul(h_TD.T, d_logit_TV).astype(head_DV.dtype)
    return d_logit_TV @ head_DV.astype(h_TD.dtype).T, d_head_DV, None


_at_once.defvjp(_at_once_forward, _at_once_backward)


@jax.custom_vjp
def _by_chunks(
    h_KcD: Float[Array, "K c D"], head_DV: Float[Array, "D V"], target_Kc: Int[Array, "K c"]
) -> Float[Array, ""]:
    """Compute the loss chunk by chunk.

    In differentiation, the gradient of a chunk's logits is used as soon as it exists, so no logits are computed twice.
    """
    head = head_DV.astype(h_KcD.dtype)

    def add_chunk(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        h_cD, target_c = chunk
        return total + _losses(wide_matmul(h_cD, head), target_c)[0].sum(), None

    return jax.lax.scan(add_chunk, jnp.float32(0), (h_KcD, target_Kc))[0]


def _losses(
    logit_cV: Float[Array, "c V"], target_c: Int[Array, " c"]
) -> tuple[Float[Array, " c"], Float[Array, "c V"], Float[Array, " c"]]:
    """Return losses, exponentials of the logits minus the largest one, and the sums of these exponentials."""
    max_c = logit_cV.max(axis=-1)
    exp_cV = jnp.exp(logit_cV - max_c[:, None])
    sum_c = exp_cV.sum(axis=-1)
    loss_c = jnp.log(sum_c) + max_c - jnp.take_along_axis(logit_cV, target_c[:, None], axis=-1)[:, 0]
    return jnp.where(target_c == _NO_TOKEN, 0, loss_c), exp_cV, sum_c


def _logit_gradients(
    exp_cV: Float[Array, "c V"], sum_c: Float[Array, " c"], target_c: Int[Array, " c"]
) -> Float[Array, "c V"]:
    """Return the gradient of the sum of losses with respect to the logits."""
    scale_c = jnp.where(target_c == _NO_TOKEN, 0, 1 / sum_c)
    return exp_cV * scale_c[:, None] - (jnp.arange(exp_cV.shape[1]) == target_c[:, None])


def _forward(h_KcD: jax.Array, head_DV: jax.Array, target_Kc: jax.Array) -> tuple[jax.Array, _Gradients]:
    head = head_DV.astype(h_KcD.dtype)

    def add_chunk(
        sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (total, d_head_DV), (h_cD, target_c) = sums, chunk
        loss_c, exp_cV, sum_c = _losses(wide_matmul(h_cD, head), target_c)
        d_logit_cV = _logit_gradients(exp_cV, sum_c, target_c).astype(h_cD.dtype)
        return (total + loss_c.sum(), d_head_DV + wide_matmul(h_cD.T, d_logit_cV)), d_logit_cV @ head.T

    initial = jnp.float32(0), jnp.zeros(head_DV.shape, jnp.float32)
    (total, d_head_DV), dh_KcD = jax.lax.scan(add_chunk, initial, (h_KcD, target_Kc))
    return total, (dh_KcD, d_head_DV.astype(head_DV.dtype))


def _backward(gradients: _Gradients, d_total: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    # d_total itself in half precision would scale all by a rounding error
    dh_KcD, d_head_DV = ((each.astype(jnp.float32) * d_total).astype(each.dtype) for each in gradients)
    return dh_KcD, d_head_DV, None


_by_chunks.defvjp(_forward, _backward)
