"""Gated delta nets (Yang et al. 2024, "Gated Delta Networks", section 3.4), as in Qwen3-Next.

Queries, keys and values are convolved over the last tokens, each feature by itself. The outputs of the gated delta rule
are normed, and multiplied by a gate.

B sequences of N tokens; D model width, G key heads with J value heads each, K and V widths of keys and values, W tokens
of the convolution, w = W − 1. A *feature* is one of a key head's query, key or values: F = 2·K + J·V of them. Each of t
tensor ranks has n = N/t tokens of a sequence, and computes G/t of the key heads. States and convolutions are
reset at the beginning of each document of a sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionView, DeltaNetConfig, ModelConfig
from moe_jax.models.attention import delta_rule
from moe_jax.models.attention.causal_conv import convolved, last_features
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.attention.state_scan import only_first
from moe_jax.models.layers import rms_norm
from moe_jax.parallel.sequence_shards import own_count, own_share, tp_all_gather

_EPS = 1e-6  # of the L2 norms of queries and keys
_WEIGHTS = ("conv", "decay_log", "step_bias", "value_norm")  # those that are not in matrix products


class Cache(NamedTuple):
    """What further tokens need of those before them."""

    state: delta_rule.State
    tail_BwGF: Float[Array, "B w G F"]  # features of the last W - 1 tokens, before their convolution


class Projected(NamedTuple):
    """The projections of some tokens."""

    feature_BNGF: Float[Array, "B N G F"]  # queries, keys and values before their convolution, one after the other
    gate_BNGF: Float[Array, "B N G _"]  # of the outputs, before SiLU
    rate_BNGJ: Float[Array, "B N G J"]  # of the delta rule, before a sigmoid
    step_BNGJ: Float[Array, "B N G J"]  # of the decay, before softplus


def heads(
    params: Any,
    h_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B N H V"], None]:
    """Return the output of each value head, and None, since there are no logits.

    `document_BL` has the numbers of the documents of all tokens; None: all are of one. The backward pass computes all
    but the projections again: they are the smallest part of what it needs.
    """
    projected = _projected(params, tp_all_gather(h_BnD, 1))
    shape, delta = projected.feature_BNGF.shape, model.delta_net
    document_BN = jnp.zeros(shape[:2], jnp.int32) if document_BL is None else document_BL
    before = jnp.zeros((shape[0], delta.conv_kernel_dim - 1, *shape[2:]), projected.feature_BNGF.dtype)

    @jax.checkpoint
    def outputs(weights: Any, projected: Projected) -> jax.Array:
        tokens = _tokens(weights, projected, before, document_BN, delta)
        out_BNGJV, _ = delta_rule.in_chunks(tokens, delta_rule.first_state(tokens), document_BN[:, 0])
        return _gated(weights, out_BNGJV, projected.gate_BNGF, model)

    with jax.named_scope("delta_net"):
        return outputs({name: params[name] for name in _WEIGHTS}, projected), None


def first_cache(model: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return this rank's cache before the first token. Its size does not depend on the length of the sequence."""
    delta = model.delta_net
    heads = own_count(delta.key_heads)
    state = batch, heads, delta.group, delta.key_head_dim, delta.value_head_dim
    features = 2 * delta.key_head_dim + delta.group * delta.value_head_dim
    return Cache(jnp.zeros(state), jnp.zeros((batch, delta.conv_kernel_dim - 1, heads, features), dtype))


def cached_heads(
    params: Any,
    h_BND: Float[Array, "B N D"],
    cache: Cache,
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B N H V"], Cache]:
    """Return the output of each value head for N further tokens, and the updated cache.

    Only the first `count_B` tokens of each sequence change the cache, which has no positions.
    """
    projected, length = _projected(params, h_BND), h_BND.shape[1]
    one_BN = jnp.zeros(h_BND.shape[:2], jnp.int32)  # document
    tokens = _tokens(params, projected, cache.tail_BwGF, one_BN, model.delta_net)
    rule = delta_rule.token_by_token if length == 1 else delta_rule.in_chunks
    out_BNGJV, state = rule(only_first(tokens, count_B), cache.state, one_BN[:, 0])
    tail = last_features(cache.tail_BwGF, projected.feature_BNGF, count_B)
    return _gated(params, out_BNGJV, projected.gate_BNGF, model), Cache(state, tail)


def _projected(params: Any, h_BND: Float[Array, "B N D"]) -> Projected:
    def of(name: str) -> jax.Array:
        return jnp.einsum("bnd,dgf->bngf", h_BND, params[name].astype(h_BND.dtype))

    return Projected(
        jnp.concatenate([of("query"), of("key"), of("value")], axis=-1), *map(of, ("gate", "rate", "step"))
    )


def _tokens(
    weights: Any,
    projected: Projected,
    before_BwGF: Float[Array, "B w G F"],
    document_BN: Int[Array, "B N"],
    delta: DeltaNetConfig,
) -> delta_rule.Tokens:
    """Return what the tokens do to the states; `before_BwGF` has the features of the tokens before the first one."""
    x_BNGF = convolved(projected.feature_BNGF, before_BwGF, _kernel(weights["conv"], delta), document_BN)
    query, key, value = jnp.split(x_BNGF, [delta.key_head_dim, 2 * delta.key_head_dim], axis=-1)
    rate, step = (x.astype(jnp.float32) for x in (projected.rate_BNGJ, projected.step_BNGJ))
    decay_GJ, bias_GJ = (weights[name].reshape(-1, delta.group) for name in ("decay_log", "step_bias"))
    return delta_rule.Tokens(
        query_BNGK=_unit(query) * delta.key_head_dim**-0.5,
        key_BNGK=_unit(key),
        value_BNGJV=value.reshape(*value.shape[:3], delta.group, delta.value_head_dim),
        log_decay_BNGJ=-jnp.exp(decay_GJ) * jax.nn.softplus(step + bias_GJ),
        rate_BNGJ=jax.nn.sigmoid(rate),
        document_BN=document_BN,
    )


def _kernel(conv_CW: Float[Array, "C W"], delta: DeltaNetConfig) -> Float[Array, "G F W"]:
    """Return the weights of this rank's features.

    Every tensor rank has those of all channels: queries of all heads, then keys, then values, as on disk.
    """
    parts = jnp.split(conv_CW, [delta.key_width, 2 * delta.key_width])
    by_head = (part.reshape(delta.key_heads, -1, conv_CW.shape[1]) for part in parts)
    return own_share(jnp.concatenate(list(by_head), axis=1), 0)


def _unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Return vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)


def _gated(
    weights: Any, out_BNGJV: Float[Array, "B N G J V"], gate_BNGF: Float[Array, "B N G _"], model: ModelConfig
) -> Float[Array, "B N H V"]:
    """Return the outputs of all value heads, normed in float32 and multiplied by SiLU of their gates."""
    gate = gate_BNGF.astype(jnp.float32).reshape(out_BNGJV.shape)
    gated = rms_norm(out_BNGJV, weights["value_norm"], model.rms_norm_eps) * jax.nn.silu(gate)
    return gated.reshape(*gated.shape[:2], -1, gated.shape[-1]).astype(gate_BNGF.dtype)
