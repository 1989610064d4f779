"""The choice of the next token from its logits. B sequences, V vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class Sampling(NamedTuple):
    """How tokens are drawn. The restrictions apply one after another, in the order of the fields."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None  # only the k likeliest tokens
    # only the likeliest tokens whose probabilities sum to this share or more (Holtzman et al. 2019)
    top_p: float | None = None
    min_p: float | None = None  # only tokens at least this share as likely as the likeliest (Nguyen et al. 2024)


def draw(logit_BV: Float[Array, "B V"], key_B: Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """Return a token for each sequence. Each sequence has a key of its own."""
    if sampling.temperature == 0:
        return logit_BV.argmax(axis=-1).astype(jnp.int32)
    restricted_BV = restrict(logit_BV / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(key_B, restricted_BV).astype(jnp.int32)


def restrict(logit_BV: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Return the logits, -∞ for tokens that must not be drawn. Of equal logits all or none are allowed."""
    if sampling.top_k is not None and sampling.top_k < logit_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logit_BV, sampling.top_k)[0][:, -1:]
        logit_BV = jnp.where(logit_BV >= least_B1, logit_BV, -jnp.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_BV = jnp.sort(logit_BV, axis=-1, descending=True)
        prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
        likelier_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV  # the sum over likelier tokens
        least_B1 = jnp.where(likelier_BV < sampling.top_p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logit_BV = jnp.where(logit_BV >= least_B1, logit_BV, -jnp.inf)
    if sampling.min_p:
        least_B1 = logit_BV.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logit_BV = jnp.where(logit_BV >= least_B1, logit_BV, -jnp.inf)
    return logit_BV
