"""Causal attention, with one file for each kind: grouped-query and multi-head latent attention, and what blocks have
instead of it: gated delta nets, and Mamba-2.

B sequences of L tokens, of which N are of this context rank; D model width, H query heads, V width of a head's value.
Each of t tensor ranks has n = N/t tokens of a sequence, and computes H/t of the heads. S tokens in a cache.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.models.attention import delta_net, grouped, latent, mamba
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.layers import block_norm, scaled
from moe_jax.parallel.context import context_ranks
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sequence_shards import tp_reduce_scatter, tp_sum


class AttentionKind(NamedTuple):
    """The functions of one kind of attention."""

    # params, normed tokens [B, n, D], model, view, impl, documents [B, L] or None → output of each head [B, N, H, V],
    # and its largest logit [H], or None if `impl` does not ask for it
    heads: Callable[..., tuple[jax.Array, jax.Array | None]]
    first_cache: Callable[..., Any]  # model, batch, length, dtype → an empty cache
    # params, further normed tokens [B, N, D], cache, positions of the first ones [B], how many of them later tokens see
    # [B], model, view → outputs for them [B, N, H, V], and the updated cache
    cached_heads: Callable[..., tuple[jax.Array, Any]]


_GROUPED = AttentionKind(grouped.heads, grouped.first_cache, grouped.cached_heads)
_LATENT = AttentionKind(latent.heads, latent.first_cache, latent.cached_heads)
_RECURRENT = {
    "delta_net": AttentionKind(delta_net.heads, delta_net.first_cache, delta_net.cached_heads),
    "mamba": AttentionKind(mamba.heads, mamba.first_cache, mamba.cached_heads),
}


def kind_of(model: ModelConfig, view: AttentionView) -> AttentionKind:
    """Return the kind of attention that a block of a model has."""
    if view.recurrent is not None:
        return _RECURRENT[view.recurrent]
    return _LATENT if model.has_latents else _GROUPED


class Attended(NamedTuple):
    """The results of attention."""

    added_BnD: Float[Array, "B n D"]  # to the residual stream
    max_logit_H: Float[Array, " H"] | None  # of the heads of this tensor rank, over the queries of this rank; or None


@jax.named_scope("attend")
def attend(
    params: Any,
    x_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B L"] | None = None,
) -> Attended:
    """Return what attention adds to the residual stream, including its pre-norm. Runs inside `shard_map`.

    Tokens attend to tokens of their own document, by the numbers in `document_BL`, which has all tokens of the
    sequences in order, also those of other ranks; None: all are of one document. Rotary positions count from the
    beginning of a sequence: what they do depends only on differences of positions, so counting from the beginning of
    each document would change nothing but rounding. Chunks count from there, too.
    """
    h_BnD = block_norm(params, x_BnD, model)
    if view.chunk is not None:  # each is a document by itself
        document_BL = _in_chunks(document_BL, view.chunk, len(x_BnD), x_BnD.shape[1] * jax.lax.axis_size(Axis.TENSOR))
    out_BNHV, max_logit_H = kind_of(model, view).heads(params, h_BnD, model, view, impl, document_BL)
    y_BnD = tp_reduce_scatter(_project_output(params, out_BNHV), 1)
    return Attended(_residual(params, y_BnD, model), max_logit_H)


def _in_chunks(document_BL: Int[Array, "B L"] | None, chunk: int, batch: int, own: int) -> Int[Array, "B L"] | None:
    """Return the numbers of documents that are cut into chunks of so many tokens; None: all are in one.

    A context rank has `own` tokens of each sequence.
    """
    length = own * context_ranks()
    if length <= chunk:
        return document_BL
    chunk_L = jnp.arange(length, dtype=jnp.int32) // chunk
    if document_BL is None:
        return jnp.broadcast_to(chunk_L, (batch, length))
    return document_BL * (-(-length // chunk)) + chunk_L


def attend_cached(
    params: Any,
    x_BND: Float[Array, "B N D"],
    cache: Any,
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B N D"], Any]:
    """Return the same for N further tokens of each sequence, and the updated cache.

    Every tensor rank has all N tokens, and the cache of its own heads. The first token of a sequence is at `position_B`
    and sees the cached tokens before it. Later tokens see the first `count_B`; others fill up a batch.
    """
    h_BND = block_norm(params, x_BND, model)
    out_BNHV, cache = kind_of(model, view).cached_heads(params, h_BND, cache, position_B, count_B, model, view)
    return _residual(params, tp_sum(_project_output(params, out_BNHV)), model), cache


def _residual(params: Any, y_BND: Float[Array, "B N D"], model: ModelConfig) -> Float[Array, "B N D"]:
    """Return what attention adds to the residual stream, from the projected output of its heads."""
    if "out_bias" in params:
        y_BND = y_BND + params["out_bias"].astype(y_BND.dtype)
    return scaled(y_BND, model.residual_multiplier)


def _project_output(params: Any, out_BNHV: Float[Array, "B N H V"]) -> Float[Array, "B N D"]:
    """Project heads to the model width. Given some of the heads, the result is their part of the sum."""
    return jnp.einsum("bnhv,hvd->bnd", out_BNHV, params["out"].astype(out_BNHV.dtype))
