"""Multi-head latent attention (DeepSeek-V2 2024, section 2.1).

B sequences of L tokens, of which N are of this context rank; D model width, H heads; R and Q widths of the latents of
keys and values, and of queries; K and P widths of the parts of a head's query and key that are not rotated, and that
are; V width of a head's value. Each of t tensor ranks has n = N/t tokens of a sequence, computes their latents, and H/t
of the heads. S tokens in the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.models.attention.core import AttentionImpl, masked_attention, update_slots, visible_slots
from moe_jax.models.attention.kernels import KERNELS
from moe_jax.models.attention.max_logits import with_max_logits
from moe_jax.models.attention.over_context import FORMS
from moe_jax.models.layers import matmul, norm_weight, rms_norm, wide_product
from moe_jax.models.rope import logit_scale, rotate
from moe_jax.parallel.context import context_ranks, own_positions
from moe_jax.parallel.sequence_shards import tp_all_gather

Cache = Float[Array, "B RP S"]  # latents, and below them the rotated keys


def heads(
    params: Any,
    h_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N H V"], Float[Array, " H"] | None]:
    """Return the output of each head, and its largest logit if `impl` asks for it.

    `document_BL` has the numbers of the documents of all tokens; None: all are of one.
    """
    parts = _latents(params, h_BnD, model)
    ends = [sum(part.shape[-1] for part in parts[: i + 1]) for i in range(2)]
    # gather the latents, which are narrower than the features that they are computed from
    query_BNQ, latent_BNR, key_BNP = jnp.split(tp_all_gather(jnp.concatenate(parts, axis=-1), 1), ends, axis=-1)
    position_BN = jnp.broadcast_to(own_positions(key_BNP.shape[1]), key_BNP.shape[:2])
    length = key_BNP.shape[1] * context_ranks()
    plain, rotated = _queries(params, query_BNQ, position_BN, model, view, length)
    latents = latent_BNR, _rotate(key_BNP[:, :, None], position_BN, model, view, length)
    query = jnp.concatenate([plain, rotated], axis=-1)
    weights = {name: params[name] for name in ("key", "value")}
    scale, sink = logit_scale(model), params.get("sink")
    with jax.named_scope("attention"):
        if context_ranks() > 1:  # exchange the latents, which are narrower than keys and values
            form = FORMS[impl.context_form]
            out = form(query, latents, weights, sink, document_BL, _keys_and_values, view.window, scale)
        else:
            key, value = _keys_and_values(weights, latents)
            out = KERNELS[impl.kernel](query, key, value, view.window, scale, sink, document_BL)

    def keys_of(latents: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _keys_and_values(weights, latents)[0]

    return with_max_logits(out, query, latents, keys_of, document_BL, view.window, scale, impl)


def first_cache(model: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return an empty cache of latents and rotated keys, which all heads share."""
    rank = model.latent.kv_lora_rank
    assert rank is not None, "a model with latents"
    return jnp.zeros((batch, rank + model.latent.qk_rope_head_dim, length), dtype)


def cached_heads(
    params: Any,
    h_BND: Float[Array, "B N D"],
    cache: Cache,
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B N H V"], Cache]:
    """Return the output of each head for N further tokens, the first at `position_B`, and the updated cache.

    The slots of tokens that do not count are filled again before a later token sees them. Keys and values of cached
    tokens are not computed again: queries are projected into the space of the latents, and
    the weighted latents are projected to values.
    """
    query_BNQ, latent_BNR, key_BNP = _latents(params, h_BND, model)
    position_BN = position_B[:, None] + jnp.arange(h_BND.shape[1])
    rank, length = latent_BNR.shape[-1], cache.shape[-1]
    key_BNP = _rotate(key_BNP[:, :, None], position_BN, model, view, length)[:, :, 0]
    cache = update_slots(cache, jnp.concatenate([latent_BNR, key_BNP], axis=-1), position_B)
    both_BS1 = jnp.moveaxis(cache, -1, 1)[:, :, None]
    plain, rotated = _queries(params, query_BNQ, position_BN, model, view, length)
    latent_query = jnp.einsum("bnhk,rhk->bnhr", plain, params["key"].astype(plain.dtype))
    mask_BNS, scale, sink = visible_slots(position_BN, length, view), logit_scale(model), params.get("sink")

    def weighted(query: jax.Array, both_BS1: jax.Array) -> jax.Array:
        return masked_attention(query, both_BS1, both_BS1, mask_BNS, scale, sink)  # the latents alone would be copied

    out_BNHR = wide_product(weighted, jnp.concatenate([latent_query, rotated], axis=-1), both_BS1)[..., :rank]
    return jnp.einsum("bnhr,rhv->bnhv", out_BNHR, params["value"].astype(out_BNHR.dtype)), cache


def _latents(
    params: Any, h_BND: Float[Array, "B N D"], model: ModelConfig
) -> tuple[Float[Array, "B N Q"], Float[Array, "B N R"], Float[Array, "B N P"]]:
    """Return the latents of queries, the latents of keys and values, and the key to rotate.

    Without a latent of queries the first is `h_BND`.
    """
    query, eps = h_BND, model.rms_norm_eps if model.latent.rms_norm_eps is None else model.latent.rms_norm_eps
    if "query_latent" in params:
        weight = norm_weight(params["query_latent_norm"], model)
        query = rms_norm(matmul(h_BND, params["query_latent"]), weight, eps)
    latent = rms_norm(matmul(h_BND, params["kv_latent"]), norm_weight(params["kv_latent_norm"], model), eps)
    return query, latent, matmul(h_BND, params["rope_key"])


def _keys_and_values(
    weights: Any, latents: tuple[Float[Array, "B N R"], Float[Array, "B N 1 P"]]
) -> tuple[Float[Array, "B N H KP"], Float[Array, "B N H V"]]:
    """Compute keys and values from latents and the rotated key that all heads share."""
    latent_BNR, key_BN1P = latents
    plain = _project_heads(weights, "key", latent_BNR)
    key_BNHP = jnp.broadcast_to(key_BN1P, (*plain.shape[:3], key_BN1P.shape[-1]))
    return jnp.concatenate([plain, key_BNHP], axis=-1), _project_heads(weights, "value", latent_BNR)


def _queries(
    params: Any,
    query_BNQ: Float[Array, "B N Q"],
    position_BN: Int[Array, "B N"],
    model: ModelConfig,
    view: AttentionView,
    length: int,
) -> tuple[Float[Array, "B N H K"], Float[Array, "B N H P"]]:
    """Return the part of the queries that is not rotated, and the rotated part."""
    plain, rotated = jnp.split(_project_heads(params, "query", query_BNQ), [model.latent.qk_nope_head_dim], axis=-1)
    return plain, _rotate(rotated, position_BN, model, view, length)


def _rotate(
    x_BNHP: Float[Array, "B N H P"],
    position_BN: Int[Array, "B N"],
    model: ModelConfig,
    view: AttentionView,
    length: int,
) -> Float[Array, "B N H P"]:
    return rotate(x_BNHP, position_BN, model, length) if view.rope else x_BNHP


def _project_heads(params: Any, name: str, latent_BNR: Float[Array, "B N R"]) -> Float[Array, "B N H K"]:
    return jnp.einsum("bnr,rhk->bnhk", latent_BNR, params[name].astype(latent_BNR.dtype))
