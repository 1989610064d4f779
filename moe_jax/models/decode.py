"""Text sampling, one token at a time, with cached keys and values or latents.

Runs inside `shard_map` over one device. B sequences, S tokens in the cache, D model width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from moe_jax.config import ModelConfig
from moe_jax.models import moe as moe_layer
from moe_jax.models.attention import attend_next, kind_of
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.head import unembed
from moe_jax.models.layers import mlp, rms_norm, scaled
from moe_jax.models.parameters import block_params
from moe_jax.models.transformer import ComputeConfig, embed

Cache = list[Any]  # one entry per block


def sample(
    params: Any,
    prompt_BS: Int[Array, "B S"],
    prompt_length: Int[Array, ""],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    model: ModelConfig,
    compute: ComputeConfig,
) -> Int[Array, "B S"]:
    """Return the first `prompt_length` tokens of the prompt followed by sampled tokens, S in total.

    With temperature 0 the likeliest token is taken. No token is dropped, whatever capacity the model was trained with.
    For gates whose experts choose tokens in training, a token gets its likeliest experts here, because the tokens that
    it would be compared with do not exist yet.
    """
    overrides: dict[str, Any] = dict(model.moe.gate_facts.sampled_as)
    moe = dataclasses.replace(model.moe, **overrides)
    model = dataclasses.replace(model, moe=dataclasses.replace(moe, capacity_factor=None, dispatcher="sort"))
    batch, length = prompt_BS.shape
    blocks = block_params(params, model)
    cache: Cache = [kind_of(model).first_cache(model, batch, length, compute.dtype) for _ in blocks]

    def step(carry: tuple[Cache, jax.Array], position: jax.Array) -> tuple[tuple[Cache, jax.Array], jax.Array]:
        cache, sampled_B = carry
        token_B = jnp.where(position < prompt_length, prompt_BS[:, position], sampled_B)
        logit_BV, cache = _next_logits(params, blocks, cache, token_B, position, model, compute)
        draw_B = jax.random.categorical(
            jax.random.fold_in(key, position), logit_BV / jnp.maximum(temperature, 1e-6), axis=-1
        )
        return (cache, jnp.where(temperature > 0, draw_B, logit_BV.argmax(axis=-1)).astype(jnp.int32)), token_B

    _, token_SB = jax.lax.scan(step, (cache, jnp.zeros(batch, jnp.int32)), jnp.arange(length))
    return token_SB.T


def _next_logits(
    params: Any,
    blocks: list[Any],
    cache: Cache,
    token_B: Int[Array, " B"],
    position: Int[Array, ""],
    model: ModelConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "B V"], Cache]:
    """Return the logits of the token after `token_B`, which is at `position`, and the updated cache."""
    x_B1D = embed(params["embedding"], token_B[:, None], model, compute)
    updated: Cache = []
    router_inputs = RouterInputs(token_B, jnp.full_like(token_B, position), None, jnp.int32(0))
    for number, (block, view, block_cache) in enumerate(zip(blocks, model.views, cache, strict=True)):
        y_B1D, block_cache = attend_next(block["attention"], x_B1D, block_cache, position, model, view)
        updated.append(block_cache)
        x_B1D += y_B1D
        h_BD = rms_norm(x_B1D, block["norm"], model.rms_norm_eps)[:, 0]
        y_BD = _feed_forward(block, h_BD, model, compute, router_inputs.above(number))
        x_B1D += scaled(y_BD, model.residual_multiplier)[:, None]
    return unembed(params, x_B1D, model)[:, 0], updated


def _feed_forward(
    block: Any, h_BD: jax.Array, model: ModelConfig, compute: ComputeConfig, router_inputs: RouterInputs
) -> jax.Array:
    if "mlp" in block:
        return mlp(block["mlp"], h_BD)
    sent, metadata, _ = moe_layer.route(block["moe"], h_BD, model.moe, 1, moe_layer.RouterContext(router_inputs))
    returned = moe_layer.run_experts(block["moe"]["experts"], sent, model.moe, compute.product)
    y_BD = moe_layer.unpermute(returned, metadata, model.moe)
    return sum((mlp(shared, h_BD) for shared in moe_layer.shared_experts(block["moe"])), start=y_BD)
