"""The short causal convolution of recurrent layers: each feature by itself, over the last tokens of its document.

B sequences of N tokens, F features in one or several dimensions, W tokens of the convolution, w = W − 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def convolved(
    x_BNF: Float[Array, "B N *F"],
    before_BwF: Float[Array, "B w *F"],
    kernel_FW: Float[Array, "*F W"],
    document_BN: Int[Array, "B N"],
    bias_F: Float[Array, "*F"] | None = None,
) -> Float[Array, "B N *F"]:
    """Return SiLU of the convolution of each feature, in float32. The last weight is that of the token itself.

    `before_BwF` has the tokens before the first one, which are of its document.
    """
    length, width = x_BNF.shape[1], kernel_FW.shape[-1]
    joined = jnp.concatenate([before_BwF, x_BNF], axis=1)
    documents = jnp.pad(document_BN, ((0, 0), (width - 1, 0)), mode="edge")
    y_BNF = jnp.zeros(x_BNF.shape, jnp.float32)
    for place in range(width):
        same_BN: Bool[Array, "B N"] = documents[:, place : place + length] == document_BN
        same = same_BN.reshape(*same_BN.shape, *[1] * (x_BNF.ndim - 2))
        earlier = jnp.where(same, joined[:, place : place + length], 0)
        y_BNF += earlier.astype(jnp.float32) * kernel_FW[..., place]
    return jax.nn.silu(y_BNF if bias_F is None else y_BNF + bias_F)


def last_features(
    before_BwF: Float[Array, "B w *F"], x_BNF: Float[Array, "B N *F"], count_B: Int[Array, " B"]
) -> Float[Array, "B w *F"]:
    """Return what a convolution needs after the first `count_B` further tokens: their last features before it."""
    joined, width = jnp.concatenate([before_BwF, x_BNF], axis=1), before_BwF.shape[1]
    return jax.vmap(lambda x_mF, count: jax.lax.dynamic_slice_in_dim(x_mF, count, width))(joined, count_B)
