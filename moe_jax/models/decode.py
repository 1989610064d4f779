"""Text sampling with cached keys and values, latents or states: the prompt at once, then one token after another.

Runs inside `shard_map` over data, expert and tensor ranks. Data and expert ranks have different sequences, and exchange
the rows of experts like a training step. Tensor ranks have the same sequences, and sum what they compute with their
heads and hidden widths. Parameters are those of `unstacked`.

B sequences of different lengths on this device, N further tokens of each, K tokens or pieces of one call, S slots of
the cache, D model width, V vocabulary, T = B·N.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.config.layer_layout import decoder_segments
from moe_jax.config.registry import NO_HOOKS
from moe_jax.models import moe as moe_layer
from moe_jax.models.attention import attend_cached, kind_of
from moe_jax.models.dispatch import dispatch_compute_combine
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.head import unembed
from moe_jax.models.hooks import hooks_of
from moe_jax.models.layers import block_norm, mlp, scaled
from moe_jax.models.sampling import Sampling, draw
from moe_jax.models.transformer import ComputeConfig, embed
from moe_jax.parallel.sequence_shards import tp_sum
from moe_jax.parallel.trees import Params

Cache = list[Any]  # of each block

_CPU_TILE = 2  # rows: the fastest of 1, 2, 4 and 8 with one sequence and with eight
PREFILL_PIECE = 256  # tokens of each prompt that are processed at once


class DecodeState(NamedTuple):
    """The state of some sequences between two calls."""

    cache: Cache  # of all tokens before the last one
    token_B: Int[Array, " B"]  # the last token of each sequence
    position_B: Int[Array, " B"]  # its position
    key_B: Key[Array, " B"]  # each sequence's own key
    drawn_B: Int[Array, " B"]  # tokens drawn for a sequence, which make the keys of its draws differ


def prefill(
    params: Any,
    prompt_BN: Int[Array, "B N"],
    length_B: Int[Array, " B"],
    key_B: Key[Array, " B"],
    drawn_B: Int[Array, " B"],
    *,
    slots: int,
    model: ModelConfig,
    compute: ComputeConfig,
    sampling: Sampling,
) -> DecodeState:
    """Process the first `length_B` tokens of each prompt, and draw one token for each.

    The cache has `slots` slots, at least N. Above `PREFILL_PIECE`, N is a multiple of it: the memory of attention's
    logits grows linearly with the length of a prompt. No token is dropped, whatever capacity the model was trained
    with. For gates whose experts choose tokens in training, a token gets its likeliest experts here, because the tokens
    that it would be compared with do not exist yet.
    """
    model = _dropless(model)
    batch = prompt_BN.shape[0]
    cache = _first_cache(model, batch, slots, compute)
    piece = min(prompt_BN.shape[1], PREFILL_PIECE)

    def extend(carry: tuple[Cache, jax.Array], number: jax.Array) -> tuple[tuple[Cache, jax.Array], None]:
        cache, last_B1D = carry
        token_Bn = jax.lax.dynamic_slice_in_dim(prompt_BN, number * piece, piece, axis=1)
        position_B, count_B = jnp.full_like(length_B, number * piece), jnp.clip(length_B - number * piece, 0, piece)
        x_BnD, cache = _extend(params, cache, token_Bn, position_B, count_B, model, compute)
        here_B11 = ((length_B - 1) // piece == number)[:, None, None]
        ends_B1D = jnp.take_along_axis(x_BnD, ((length_B - 1) % piece)[:, None, None], axis=1)
        return (cache, jnp.where(here_B11, ends_B1D, last_B1D)), None

    # tokens after a prompt's own are hidden by causality, and what comes later does not see them
    first = cache, jnp.zeros((batch, 1, model.hidden_size), compute.dtype)
    (cache, last_B1D), _ = jax.lax.scan(extend, first, jnp.arange(prompt_BN.shape[1] // piece))
    return _drawn(params, last_B1D, DecodeState(cache, length_B, length_B, key_B, drawn_B), model, sampling)


def decode(
    params: Any, state: DecodeState, *, steps: int, model: ModelConfig, compute: ComputeConfig, sampling: Sampling
) -> tuple[Int[Array, "B K"], DecodeState]:
    """Draw K = `steps` further tokens for each sequence."""
    model = _dropless(model)

    def step(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
        one_B, last_B1 = jnp.ones_like(state.position_B), state.token_B[:, None]
        x_B1D, cache = _extend(params, state.cache, last_B1, state.position_B, one_B, model, compute)
        state = state._replace(cache=cache, position_B=state.position_B + 1)
        state = _drawn(params, x_B1D, state, model, sampling)
        return state, state.token_B

    state, token_KB = jax.lax.scan(step, state, length=steps)
    return token_KB.T, state


def score(
    params: Any,
    input_BN: Int[Array, "B N"],
    target_BN: Int[Array, "B N"],
    *,
    model: ModelConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Return the log-probability of each target after the inputs up to it, and whether it is the likeliest token.

    N and experts are as in `prefill`, so no token depends on later ones or on other sequences. The logits of one piece
    of one sequence are in memory at a time.
    """
    model = _dropless(model)
    batch, tokens = input_BN.shape
    piece = min(tokens, PREFILL_PIECE)

    def score_sequence(sequence: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_nD, target_n = sequence
        logit_nV = unembed(params, x_nD[None], model)[0]
        log_prob_nV = jax.nn.log_softmax(logit_nV)
        return jnp.take_along_axis(log_prob_nV, target_n[:, None], axis=1)[:, 0], logit_nV.argmax(axis=1) == target_n

    def score_piece(cache: Cache, number: jax.Array) -> tuple[Cache, tuple[jax.Array, jax.Array]]:
        input_Bn, target_Bn = (
            jax.lax.dynamic_slice_in_dim(each, number * piece, piece, axis=1) for each in (input_BN, target_BN)
        )
        position_B, count_B = jnp.full(batch, number * piece), jnp.full(batch, piece)
        x_BnD, cache = _extend(params, cache, input_Bn, position_B, count_B, model, compute)
        return cache, jax.lax.map(score_sequence, (x_BnD, target_Bn))

    _, pieces_KBn = jax.lax.scan(score_piece, _first_cache(model, batch, tokens, compute), jnp.arange(tokens // piece))
    log_prob_BN, is_likeliest_BN = (jnp.moveaxis(each, 0, 1).reshape(batch, tokens) for each in pieces_KBn)
    return log_prob_BN, is_likeliest_BN


def unstacked(params: Params, model: ModelConfig, take: Callable[[Any, int], list[Any]]) -> Params:
    """Return parameters with a list of the decoder's blocks, from those with stacked blocks in order.

    `take` returns the parts of a leaf that is stacked over so many periods. Programs that read one block after another
    from a stack would copy each first, whole, with all its experts.
    """
    blocks: list[Any] = []
    for number, segment in enumerate(decoder_segments(model)):
        leaves, tree = jax.tree.flatten(params["segments"][number], is_leaf=lambda leaf: isinstance(leaf, tuple))
        parts = zip(*(take(leaf, segment.repeats) for leaf in leaves), strict=True)
        periods = [jax.tree.unflatten(tree, own) for own in parts]
        blocks += [period[place] for period in periods for place in range(len(segment.kinds))]
    return {name: leaf for name, leaf in params.items() if name != "segments"} | {"blocks": blocks}


def _views(model: ModelConfig) -> list[AttentionView]:
    return [view for segment in decoder_segments(model) for view in segment.repeats * segment.views]


def _first_cache(model: ModelConfig, batch: int, slots: int, compute: ComputeConfig) -> Cache:
    return [kind_of(model, view).first_cache(model, batch, slots, compute.dtype) for view in _views(model)]


def _dropless(model: ModelConfig) -> ModelConfig:
    overrides: dict[str, Any] = dict(model.moe.gate_facts.sampled_as)
    moe = dataclasses.replace(model.moe, **overrides)
    return dataclasses.replace(model, moe=dataclasses.replace(moe, capacity_factor=None, dispatcher="sort"))


def _drawn(
    params: Any, x_B1D: Float[Array, "B 1 D"], state: DecodeState, model: ModelConfig, sampling: Sampling
) -> DecodeState:
    """Return the state with the token that follows the residual stream of the last one."""
    keys = jax.vmap(jax.random.fold_in)(state.key_B, state.drawn_B)
    token_B = draw(unembed(params, x_B1D, model)[:, 0], keys, sampling)
    return state._replace(token_B=token_B, drawn_B=state.drawn_B + 1)


def _extend(
    params: Any,
    cache: Cache,
    token_BN: Int[Array, "B N"],
    position_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    model: ModelConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "B N D"], Cache]:
    """Return the residual stream of further tokens, the first of which are at `position_B`, and the updated cache.

    Later tokens see the first `count_B` of each sequence.
    """
    x_BND = embed(params["embedding"], token_BN, model, compute)
    position_BN = position_B[:, None] + jnp.arange(token_BN.shape[1])
    inputs, updated = RouterInputs(token_BN, position_BN, None, jnp.int32(0)).flat(), []
    for number, (block, view, old) in enumerate(zip(params["blocks"], _views(model), cache, strict=True)):
        y_BND, new = attend_cached(block["attention"], x_BND, old, position_B, count_B, model=model, view=view)
        updated.append(new)
        x_BND += y_BND
        if not view.has_mlp:
            continue
        h_BND = block_norm(block, x_BND, model)
        added = _feed_forward(block, h_BND, model, compute, inputs.above(number))
        x_BND += scaled(added, model.residual_multiplier)
    return x_BND, updated


def _feed_forward(
    block: Any, h_BND: Float[Array, "B N D"], model: ModelConfig, compute: ComputeConfig, router_inputs: RouterInputs
) -> Float[Array, "B N D"]:
    if "mlp" in block:
        return tp_sum(mlp(block["mlp"], h_BND))
    params, moe, h_TD = block["moe"], model.moe, h_BND.reshape(-1, model.hidden_size)
    context = moe_layer.RouterContext(router_inputs)
    sent, metadata, *_ = moe_layer.route(params, h_TD, moe, compute.ep_size(), context)
    product = compute.product
    if compute.platform == "cpu":  # an expert has few rows, and a tile is computed whole
        product = product._replace(min_tile=_CPU_TILE)
    experts = partial(moe_layer.run_experts, params["experts"], moe=moe, product=product)
    as_they_are = dataclasses.replace(moe, hooks=NO_HOOKS)  # hooks round what travels, differently on each mesh
    returned = dispatch_compute_combine(sent, experts, compute.route.without_tensor, as_they_are)
    shared = [mlp(each, h_TD) for each in moe_layer.shared_experts(params)]
    y_TD, *shared = tp_sum([dispatcher_of(moe).unpermute(returned, metadata), *shared])
    return sum(shared, start=hooks_of(moe).after_layer(y_TD)).reshape(h_BND.shape)
