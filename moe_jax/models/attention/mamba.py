"""Mamba-2 layers (Dao & Gu 2024, "Transformers are SSMs", section 7), as in Granite 4.

Values, keys and queries (x, B and C in the paper) are convolved over the last tokens, each feature by itself. The
outputs of the recurrence are multiplied by a gate, and then normed over each group of heads.

B sequences of N tokens; D model width, H heads in G groups of J heads each, K numbers of a state for each of V features
of a head's value, F = H·V + 2·G·K features that are convolved. Each of t tensor ranks has n = N/t tokens of a sequence,
and computes H/t of the heads. The groups are shared by the ranks; if there is only one, each rank computes its keys and
queries, and the mean square for its norm is summed over the ranks. States and convolutions are reset at the beginning
of each document of a sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionView, MambaConfig, ModelConfig
from moe_jax.models.attention import ssd
from moe_jax.models.attention.causal_conv import convolved, last_features
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.attention.state_scan import only_first
from moe_jax.parallel.sequence_shards import own_count, own_share, tp_all_gather, tp_sum

_CONVOLVED = ("value", "key", "query")  # the parts of the features, in their order
_WEIGHTS = (
    *(f"conv_{part}{kind}" for part in _CONVOLVED for kind in ("", "_bias")),
    *("decay_log", "step_bias", "skip", "value_norm"),
)  # those that are not in matrix products


class Cache(NamedTuple):
    """What further tokens need of those before them."""

    state: ssd.State
    tail_BwF: Float[Array, "B w F"]  # features of the last tokens, before their convolution


class Projected(NamedTuple):
    """The projections of some tokens."""

    feature_BNF: Float[Array, "B N F"]  # values, keys and queries before their convolution, one after the other
    gate_BNHV: Float[Array, "B N H V"]  # of the outputs, before SiLU
    step_BNH: Float[Array, "B N H"]  # Δ before softplus


def heads(
    params: Any,
    h_BnD: Float[Array, "B n D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B N H V"], None]:
    """Return the output of each head, and None, since there are no logits.

    `document_BL` has the numbers of the documents of all tokens; None: all are of one. The backward pass computes all
    but the projections again.
    """
    projected, mamba = _projected(params, tp_all_gather(h_BnD, 1), model.mamba), model.mamba
    batch, length, features = projected.feature_BNF.shape
    document_BN = jnp.zeros((batch, length), jnp.int32) if document_BL is None else document_BL
    before = jnp.zeros((batch, mamba.d_conv - 1, features), projected.feature_BNF.dtype)

    @jax.checkpoint
    def outputs(weights: Any, projected: Projected) -> jax.Array:
        tokens, value = _tokens(weights, projected, before, document_BN, mamba)
        out_BNGJV, _ = ssd.in_chunks(tokens, ssd.first_state(tokens), document_BN[:, 0])
        return _gated(weights, out_BNGJV, value, projected.gate_BNHV, model)

    with jax.named_scope("mamba"):
        return outputs({name: params[name] for name in _WEIGHTS}, projected), None


def first_cache(model: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return this rank's cache before the first token. Its size does not depend on the length of the sequence."""
    mamba = model.mamba
    heads, groups = own_count(mamba.num_heads or 0), 1 if mamba.n_groups == 1 else own_count(mamba.n_groups)
    state = batch, groups, heads // groups, mamba.d_state, mamba.head_dim
    features = heads * mamba.head_dim + 2 * groups * mamba.d_state
    return Cache(jnp.zeros(state), jnp.zeros((batch, mamba.d_conv - 1, features), dtype))


def cached_heads(
    params: Any,
    h_BND: Float[Array, "B N D"],
    cache: Cache,
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    view: AttentionView,
) -> tuple[Float[Array, "B N H V"], Cache]:
    """Return the output of each head for N further tokens, and the updated cache.

    Only the first `count_B` tokens of each sequence change the cache, which has no positions.
    """
    projected, length = _projected(params, h_BND, model.mamba), h_BND.shape[1]
    one_BN = jnp.zeros(h_BND.shape[:2], jnp.int32)  # document
    tokens, value = _tokens(params, projected, cache.tail_BwF, one_BN, model.mamba)
    recurrence = ssd.token_by_token if length == 1 else ssd.in_chunks
    out_BNGJV, state = recurrence(only_first(tokens, count_B), cache.state, one_BN[:, 0])
    tail = last_features(cache.tail_BwF, projected.feature_BNF, count_B)
    return _gated(params, out_BNGJV, value, projected.gate_BNHV, model), Cache(state, tail)


def _projected(params: Any, h_BND: Float[Array, "B N D"], mamba: MambaConfig) -> Projected:
    def of(name: str) -> jax.Array:
        matrix = params[name] if name == "value" else _own_groups(params[name], 1, mamba)
        y = jnp.einsum("bnd,dhf->bnhf", h_BND, matrix.astype(h_BND.dtype))
        return y.reshape(*y.shape[:2], -1)

    return Projected(
        jnp.concatenate([of(name) for name in _CONVOLVED], axis=-1),
        jnp.einsum("bnd,dhv->bnhv", h_BND, params["gate"].astype(h_BND.dtype)),
        jnp.einsum("bnd,dh->bnh", h_BND, params["step"].astype(h_BND.dtype)),
    )


def _own_groups(x: jax.Array, dim: int, mamba: MambaConfig) -> jax.Array:
    """Return what belongs to the groups of this rank's heads, of an array with all groups."""
    return x if mamba.n_groups == 1 else own_share(x, dim)


def _tokens(
    weights: Any,
    projected: Projected,
    before_BwF: Float[Array, "B w F"],
    document_BN: Int[Array, "B N"],
    mamba: MambaConfig,
) -> tuple[ssd.Tokens, Float[Array, "B N G J V"]]:
    """Return what the tokens do to the states, and the convolved values.

    `before_BwF` has the features of the tokens before the first one.
    """
    kernels, biases = zip(*(_convolution(weights, part, mamba) for part in _CONVOLVED), strict=True)
    feature = projected.feature_BNF
    x_BNF = convolved(feature, before_BwF, jnp.concatenate(kernels), document_BN, jnp.concatenate(biases))
    own_heads = projected.step_BNH.shape[-1]
    values, shape = own_heads * mamba.head_dim, x_BNF.shape[:2]
    keys = (x_BNF.shape[-1] - values) // 2
    value, key, query = jnp.split(x_BNF, [values, values + keys], axis=-1)
    groups = keys // mamba.d_state
    value_BNGJV = value.reshape(*shape, groups, own_heads // groups, mamba.head_dim)
    step_BNH = jax.nn.softplus(projected.step_BNH.astype(jnp.float32) + weights["step_bias"])
    tokens = ssd.Tokens(
        query_BNGK=query.reshape(*shape, groups, mamba.d_state),
        key_BNGK=key.reshape(*shape, groups, mamba.d_state),
        value_BNGJV=step_BNH.reshape(*value_BNGJV.shape[:4], 1) * value_BNGJV,
        log_decay_BNGJ=(-jnp.exp(weights["decay_log"]) * step_BNH).reshape(value_BNGJV.shape[:4]),
        document_BN=document_BN,
    )
    return tokens, value_BNGJV


def _convolution(weights: Any, part: str, mamba: MambaConfig) -> tuple[jax.Array, jax.Array]:
    """Return the weights [features, W] and the biases of this rank's features of one part."""
    kernel, bias = weights[f"conv_{part}"], weights[f"conv_{part}_bias"]
    if part != "value":
        kernel, bias = _own_groups(kernel, 0, mamba), _own_groups(bias, 0, mamba)
    return kernel.reshape(-1, mamba.d_conv), bias.ravel()


def _gated(
    weights: Any,
    out_BNGJV: Float[Array, "B N G J V"],
    value_BNGJV: Float[Array, "B N G J V"],
    gate_BNHV: Float[Array, "B N H V"],
    model: ModelConfig,
) -> Float[Array, "B N H V"]:
    """Return the outputs of all heads plus their values, multiplied by SiLU of their gates and then normed."""
    shape, mamba = out_BNGJV.shape, model.mamba
    skip_GJ, weight_GJV = weights["skip"].reshape(shape[2:4]), weights["value_norm"].reshape(shape[2:])
    y_BNGJV = out_BNGJV + skip_GJ[..., None] * value_BNGJV
    y_BNGJV *= jax.nn.silu(gate_BNHV.astype(jnp.float32).reshape(shape))
    square_BNG = jnp.sum(jnp.square(y_BNGJV), axis=(3, 4))
    if mamba.n_groups == 1:
        square_BNG = tp_sum(square_BNG)
    mean_BNG11 = (square_BNG * (mamba.n_groups / mamba.value_width))[..., None, None]
    normed = y_BNGJV * jax.lax.rsqrt(mean_BNG11 + model.rms_norm_eps) * weight_GJV
    return normed.reshape(gate_BNHV.shape).astype(gate_BNHV.dtype)
