"""The last norm, the head, and the cross-entropy of its logits, all at once or of one chunk of tokens after another.

B sequences of this device, n tokens of each that are its own, T = B·n; K chunks of c tokens; D model width, V
vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from moe_jax.config import Model
from moe_jax.kernels import tokens_of_chunk
from moe_jax.models.layers import rms_norm, wide_matmul

_SCOPE = "cross_entropy"
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def unembed(params: Any, x_BnD: Float[Array, "B n D"], model: Model) -> Float[Array, "B n V"]:
    """Logits in float32."""
    return wide_matmul(rms_norm(x_BnD, params["norm"], model.norm_eps), _matrix(params, model))


def cross_entropy(
    params: Any, x_BnD: Float[Array, "B n D"], target_Bn: Int[Array, "B n"], model: Model, loss_chunk: int | None
) -> Float[Array, ""]:
    """Nats of all tokens, summed; `loss_chunk` is that of the config."""
    chunk = tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk)
    if chunk == target_Bn.size:
        logit_BnV = unembed(params, x_BnD, model)
        with jax.named_scope(_SCOPE):
            return optax.losses.softmax_cross_entropy_with_integer_labels(logit_BnV, target_Bn).sum()
    h_BnD = rms_norm(x_BnD, params["norm"], model.norm_eps)
    h_KcD, target_Kc = h_BnD.reshape(-1, chunk, model.d_model), target_Bn.reshape(-1, chunk)
    with jax.named_scope(_SCOPE):
        return _by_chunks(h_KcD, _matrix(params, model), target_Kc)


def _matrix(params: Any, model: Model) -> Float[Array, "D V"]:
    matrix: jax.Array = params["embedding"].T if model.tie_embeddings else params["head"]
    return matrix


@jax.custom_vjp
def _by_chunks(
    h_KcD: Float[Array, "K c D"], head_DV: Float[Array, "D V"], target_Kc: Int[Array, "K c"]
) -> Float[Array, ""]:
    """The backward pass makes each chunk's logits again, and keeps only their log-sum-exp."""
    return _forward(h_KcD, head_DV, target_Kc)[0]


def _forward(h_KcD: jax.Array, head_DV: jax.Array, target_Kc: jax.Array) -> tuple[jax.Array, _Saved]:
    head = head_DV.astype(h_KcD.dtype)

    def of_chunk(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h_cD, target_c = chunk
        logit_cV = wide_matmul(h_cD, head)
        log_sum_c = jax.nn.logsumexp(logit_cV, axis=-1)
        target_logit_c = jnp.take_along_axis(logit_cV, target_c[:, None], axis=-1)[:, 0]
        return total + (log_sum_c - target_logit_c).sum(), log_sum_c

    total, log_sum_Kc = jax.lax.scan(of_chunk, jnp.float32(0), (h_KcD, target_Kc))
    return total, (h_KcD, head_DV, target_Kc, log_sum_Kc)


def _backward(saved: _Saved, d_total: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    h_KcD, head_DV, target_Kc, log_sum_Kc = saved
    head = head_DV.astype(h_KcD.dtype)

    def of_chunk(d_head_DV: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h_cD, target_c, log_sum_c = chunk
        share_cV = jnp.exp(wide_matmul(h_cD, head) - log_sum_c[:, None])
        is_target_cV = jnp.arange(head.shape[1]) == target_c[:, None]
        d_logit_cV = ((share_cV - is_target_cV) * d_total).astype(h_cD.dtype)
        return d_head_DV + wide_matmul(h_cD.T, d_logit_cV), (d_logit_cV @ head.T)

    d_head_DV, dh_KcD = jax.lax.scan(of_chunk, jnp.zeros(head_DV.shape, jnp.float32), (h_KcD, target_Kc, log_sum_Kc))
    return dh_KcD, d_head_DV.astype(head_DV.dtype), None


_by_chunks.defvjp(_forward, _backward)
