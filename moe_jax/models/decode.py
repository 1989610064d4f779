"""Sampling text, one token at a time, with cached keys and values or latents; runs inside `shard_map` over one device.

B sequences, S tokens in the cache, D model width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from moe_jax.config import ModelConfig
from moe_jax.models import moe as moe_layer
from moe_jax.models.attention import attend_next, form_of
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.head import unembed
from moe_jax.models.layers import mlp, rms_norm
from moe_jax.models.parameters import block_params
from moe_jax.models.transformer import ComputeConfig

Cache = list[Any]  # of each block


def sample(
    params: Any,
    prompt_BS: Int[Array, "B S"],
    prompt_length: Int[Array, ""],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    model: ModelConfig,
    compute: ComputeConfig,
) -> Int[Array, "B S"]:
    """The prompt's first `prompt_length` tokens and sampled ones behind them, S in all. Temperature 0: the likeliest.

    No token is dropped, whatever capacity the model was trained with. Where experts choose tokens in training, a token
    has its likeliest experts here: others that it would be compared with do not exist yet.
    """
    alone: dict[str, Any] = dict(model.moe.gate_facts.sampled_as)
    moe = dataclasses.replace(model.moe, **alone)
    model = dataclasses.replace(model, moe=dataclasses.replace(moe, capacity_factor=None, dispatcher="sort"))
    batch, length = prompt_BS.shape
    blocks = block_params(params, model)
    cache: Cache = [form_of(model).first_cache(model, batch, length, compute.dtype) for _ in blocks]

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
    """Logits of the token behind `token_B`, which stands at `position`, and the cache with it."""
    x_B1D = jnp.take(params["embedding"], token_B[:, None], axis=0).astype(compute.dtype)
    updated: Cache = []
    router_inputs = RouterInputs(token_B, jnp.full_like(token_B, position), None, jnp.int32(0))
    for number, (p, view, of_block) in enumerate(zip(blocks, model.views, cache, strict=True)):
        y_B1D, of_block = attend_next(p["attention"], x_B1D, of_block, position, model, view)
        updated.append(of_block)
        x_B1D += y_B1D
        h_BD = rms_norm(x_B1D, p["norm"], model.rms_norm_eps)[:, 0]
        x_B1D += _feed_forward(p, h_BD, model, compute, router_inputs.above(number))[:, None]
    return unembed(params, x_B1D, model)[:, 0], updated


def _feed_forward(
    p: Any, h_BD: jax.Array, model: ModelConfig, compute: ComputeConfig, router_inputs: RouterInputs
) -> jax.Array:
    if "mlp" in p:
        return mlp(p["mlp"], h_BD)
    sent, metadata, _ = moe_layer.route(p["moe"], h_BD, model.moe, ep_size=1, router_inputs=router_inputs)
    returned = moe_layer.run_experts(p["moe"]["experts"], sent, model.moe, compute.product)
    y_BD = moe_layer.unpermute(returned, metadata, model.moe)
    return sum((mlp(shared, h_BD) for shared in moe_layer.shared_experts(p["moe"])), start=y_BD)
