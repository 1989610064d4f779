"""Cached decoding against the whole forward pass, and causality of the latter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    MambaConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    RopeScalingConfig,
)
from moe_jax.models import decode
from moe_jax.models.attention.core import masked_attention
from moe_jax.models.head import unembed
from moe_jax.models.layers import wide_matmul, wide_product
from moe_jax.models.sampling import Sampling
from moe_jax.models.transformer import ComputeConfig, forward
from moe_jax.parallel.mesh import make_mesh
from tests.small import first_params

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    qk_norm=True,
    moe=MoEConfig(
        num_experts=4,
        top_k=2,
        intermediate_size=12,
        first_k_dense_replace=1,
        capacity_factor=None,
        num_shared_experts=1,
        dense_residual=True,
    ),
)
COMPUTE = ComputeConfig(
    dtype="float32",
    remat="none",
    unroll=1,
    platform="cpu",
    exchange="flat",
    ranks_per_node=1,
    rank_capacity_factor=None,
)


def on_one_device(function):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    specs = {"mesh": mesh, "in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.jit(jax.shard_map(function, **specs))


def logits_of(params, token_BN, model=MODEL):
    return on_one_device(lambda p, t: unembed(p, forward(p, t, model, COMPUTE)[0], model))(params, token_BN)


@pytest.mark.parametrize("rows", [1, 2])
def test_cpus_multiply_what_decoding_does_in_bfloat16(rows: int) -> None:
    """XLA:CPU cannot multiply one row with a tied head, nor latents of two texts, with float32 results."""
    draw = np.random.default_rng(0)
    x, w, query, latents = (
        jnp.asarray(draw.standard_normal(shape), jnp.bfloat16)
        for shape in ((rows, 1, 32), (64, 32), (rows, 1, 4, 20), (rows, 16, 1, 20))
    )
    found = jax.jit(lambda x, w: wide_product(wide_matmul, x, w.T))(x, w)
    np.testing.assert_allclose(found, np.float32(x) @ np.float32(w).T, rtol=1e-5, atol=1e-5)
    mask = jnp.arange(16)[None, None].repeat(rows, axis=0) < 10
    weighted = functools.partial(masked_attention, mask=mask, scale=0.2)
    found = jax.jit(lambda q, k: wide_product(weighted, q, k, k))(query, latents)
    assert found.dtype == jnp.bfloat16
    exact = weighted(*(each.astype(jnp.float32) for each in (query, latents, latents)))
    np.testing.assert_allclose(np.float32(found), exact, rtol=0.01, atol=1e-3)


LATENT = dataclasses.replace(
    MODEL,
    num_key_value_heads=None,
    qk_norm=False,
    latent=LatentConfig(kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
)
MODELS = {
    "grouped": MODEL,
    "windows-and-no-rope": dataclasses.replace(
        MODEL,
        qk_norm_over="projection",
        partial_rotary_factor=0.5,
        qk_norm_after_rope=True,
        attention=AttentionConfig(sliding_window=3, full_every=3, nope_every=2),
    ),
    "sinks-and-biases": dataclasses.replace(
        MODEL,
        qk_norm=False,
        attention=AttentionConfig(bias=True, sinks=True, sliding_window=4),
        activation="clipped_swiglu",
        moe=dataclasses.replace(MODEL.moe, shared_gate=True),
    ),
    "chunks": dataclasses.replace(
        MODEL,
        qk_norm=False,
        qk_l2_norm=True,
        attention=AttentionConfig(chunk_size=5, full_every=3, nope_every=3, attn_scale=0.5, floor_scale=4),
        moe=dataclasses.replace(MODEL.moe, gate="sigmoid", top_k=1, apply_probs_on_input=True),
    ),
    "norms and positions of Phi": dataclasses.replace(
        MODEL,
        normalization="layernorm",
        head_bias=True,
        rope_scaling=RopeScalingConfig(
            rope_type="longrope",
            original_max_position_embeddings=10,
            short_factor=tuple(range(1, MODEL.head_width // 2 + 1)),
            long_factor=tuple(range(9, MODEL.head_width // 2 + 9)),
        ),
        moe=dataclasses.replace(MODEL.moe, gate="sparsemixer", router_jitter_noise=0.3),
    ),
    "multipliers": dataclasses.replace(
        MODEL, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=1.5
    ),
    "delta nets": dataclasses.replace(
        MODEL,
        num_layers=5,
        delta_net=DeltaNetConfig(
            num_value_heads=4, num_key_heads=2, key_head_dim=6, value_head_dim=5, full_attention_interval=2
        ),
        attention=AttentionConfig(output_gate=True),
        rms_norm_zero_centered=True,
        moe=dataclasses.replace(MODEL.moe, shared_gate=True),
    ),
    "mamba": dataclasses.replace(
        MODEL,
        num_layers=6,
        activation="squared_relu",
        mamba=MambaConfig(
            num_heads=4,
            head_dim=5,
            n_groups=2,
            d_state=6,
            attn_layer_period=3,
            attn_layer_offsets=(1,),
            mixer_only_offsets=(2,),
        ),
        attention=AttentionConfig(nope_every=1),
    ),
    "latents": dataclasses.replace(
        LATENT,
        rope_scaling=RopeScalingConfig(
            rope_type="yarn", factor=4, original_max_position_embeddings=8, mscale_all_dim=1
        ),
    ),
    "latents-sinks-window": dataclasses.replace(
        LATENT,
        latent=dataclasses.replace(LATENT.latent, q_lora_rank=None),
        attention=AttentionConfig(sinks=True, sliding_window=4, nope_every=2),
    ),
}


def texts_of(params, prompt_BN, length_B, steps, model, sampling=Sampling(), key=0):  # noqa: B008 – a tuple
    """The tokens after each prompt: [B, steps + 1]."""

    def run(params, prompt_BN, length_B, key_B):
        params = decode.unstacked(params, model, lambda leaf, _: list(leaf))
        settings = {"model": model, "compute": COMPUTE, "sampling": sampling}
        slots = prompt_BN.shape[1] + steps
        state = decode.prefill(params, prompt_BN, length_B, key_B, jnp.zeros_like(length_B), slots=slots, **settings)
        return jnp.concatenate([state.token_B[:, None], decode.decode(params, state, steps=steps, **settings)[0]], 1)

    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(key), row))(jnp.arange(len(prompt_BN)))
    return np.asarray(on_one_device(run)(params, prompt_BN, np.array(length_B, np.int32), keys))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_follows_the_forward_pass(name, monkeypatch):
    """Also of prompts of different lengths, which are processed in pieces."""
    monkeypatch.setattr(decode, "PREFILL_PIECE", 4)
    model, lengths, steps = MODELS[name], (8, 3), 7
    params = jax.tree.map(lambda x: 3 * x, first_params(model))  # sharper, so that no two logits tie
    prompt = np.random.default_rng(0).integers(0, 32, (2, 8), np.int32)
    new = texts_of(params, prompt, lengths, steps, model)
    text = np.zeros((2, 8 + steps + 1), np.int32)
    for own, before, after, length in zip(text, prompt, new, lengths, strict=True):
        own[: length + steps + 1] = [*before[:length], *after]
    best = np.asarray(logits_of(params, text, model)).argmax(axis=-1)
    for row, length in enumerate(lengths):
        expected = best[row, length - 1 : length + steps]
        np.testing.assert_array_equal(new[row], expected, err_msg="each token is the likeliest after those before")


def test_sampling_is_a_function_of_the_key_and_ignores_capacity():
    """Several sequences begin alike, so that their tokens want the same experts; each has a key of its own."""
    params = first_params(MODEL)
    tight = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, capacity_factor=0.1))
    prompt, hot = np.zeros((8, 1), np.int32), Sampling(1.0)
    texts = [
        texts_of(params, prompt, [1] * 8, 14, model, hot, seed) for model, seed in ((MODEL, 0), (tight, 0), (MODEL, 1))
    ]
    np.testing.assert_array_equal(texts[0], texts[1])
    assert (texts[0] != texts[2]).any()
    assert len({tuple(text) for text in texts[0].tolist()}) == 8


@pytest.mark.parametrize("name", ["grouped", "latents-sinks-window", "delta nets", "mamba"])
def test_no_logit_sees_a_later_token(name):
    """Causality, with experts: dropless, since later tokens never take an earlier token's slot."""
    model = MODELS[name]
    params = first_params(model)
    token_BN = jnp.array(np.random.default_rng(0).integers(0, 32, (2, 10)), jnp.int32)
    changed = token_BN.at[:, 6:].set((token_BN[:, 6:] + 1) % 32)
    before, after = (logits_of(params, tokens, model) for tokens in (token_BN, changed))
    np.testing.assert_allclose(before[:, :6], after[:, :6], rtol=1e-5, atol=1e-6)
    assert (jnp.abs(before[:, 6:] - after[:, 6:]).max(axis=-1) > 1e-3).all()
