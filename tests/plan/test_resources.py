"""Counts from the config against the declared parameters and against XLA's own count of operations."""

import math

import jax
import pytest

from moe_jax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    MambaConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
)
from moe_jax.config.registry import GATE_FACTS
from moe_jax.models.parameters import param_shapes
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.resources import count_parameters, parameters_per_device, train_flops_per_token
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of

MODELS = [
    ModelConfig(),
    ModelConfig(moe=MoEConfig(num_experts=0)),
    ModelConfig(tie_word_embeddings=True, qk_norm=True, activation="gelu"),
    ModelConfig(
        num_key_value_heads=2,
        head_dim=32,
        num_layers=5,
        moe=MoEConfig(first_k_dense_replace=1, moe_layer_freq=2, num_shared_experts=2, dense_residual=True),
    ),
    ModelConfig(latent=LatentConfig(kv_lora_rank=24, q_lora_rank=48, qk_rope_head_dim=8, v_head_dim=20)),
    ModelConfig(latent=LatentConfig(kv_lora_rank=24)),
    ModelConfig(
        qk_norm=True, qk_norm_over="projection", num_key_value_heads=2, attention=AttentionConfig(bias=True, sinks=True)
    ),
    ModelConfig(
        attention=AttentionConfig(bias=True, out_bias=False), moe=MoEConfig(num_shared_experts=1, shared_gate=True)
    ),
    ModelConfig(activation="clipped_swiglu", moe=MoEConfig(bias=True)),
    ModelConfig(moe=MoEConfig(bias=True)),
    ModelConfig(activation="gelu", moe=MoEConfig(bias=True, moe_layer_freq=2)),
    *(ModelConfig(moe=MoEConfig(gate=gate)) for gate in GATE_FACTS),
    *(ModelConfig(moe=MoEConfig(gate=gate, bias=True)) for gate in ("gpt_oss", "xmoe", "softmoe", "hash")),
    ModelConfig(moe=MoEConfig(gate="xmoe", router_rank=5)),
    ModelConfig(moe=MoEConfig(gate="softmoe", slots_per_expert=3)),
    ModelConfig(
        num_layers=7,
        rms_norm_zero_centered=True,
        attention=AttentionConfig(output_gate=True),
        delta_net=DeltaNetConfig(num_value_heads=6, num_key_heads=2, key_head_dim=12, value_head_dim=10),
        moe=MoEConfig(moe_layer_freq=2, num_shared_experts=1, shared_gate=True),
    ),
    ModelConfig(normalization="layernorm", head_bias=True, moe=MoEConfig(moe_layer_freq=2)),
    ModelConfig(normalization="layernorm", head_bias=True, tie_word_embeddings=True),
    ModelConfig(num_nextn_predict_layers=1, delta_net=DeltaNetConfig(num_value_heads=2, full_attention_interval=None)),
    ModelConfig(
        num_layers=7,
        mamba=MambaConfig(
            num_heads=6, head_dim=10, n_groups=2, d_state=12, attn_layer_period=3, attn_layer_offsets=(1,)
        ),
        moe=MoEConfig(moe_layer_freq=2, num_shared_experts=1),
    ),
    ModelConfig(num_nextn_predict_layers=1, mamba=MambaConfig(num_heads=2, head_dim=9, d_state=5, d_conv=3)),
    *(
        ModelConfig(
            num_layers=7,
            activation="squared_relu",
            mamba=MambaConfig(
                num_heads=6, d_state=12, attn_layer_period=3, attn_layer_offsets=(1,), mixer_only_offsets=(0, 1)
            ),
            moe=moe,
        )
        for moe in (MoEConfig(num_shared_experts=1), MoEConfig(first_k_dense_replace=4), MoEConfig(num_experts=0))
    ),
    ModelConfig(num_nextn_predict_layers=1, moe=MoEConfig(moe_layer_freq=2, num_shared_experts=1)),
    ModelConfig(num_nextn_predict_layers=1, tie_word_embeddings=True, moe=MoEConfig(num_experts=0)),
]


@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_the_declared_parameters(model):
    shapes = param_shapes(model)
    assert count_parameters(model).total == sum(x.size for x in jax.tree.leaves(shapes))
    experts = [x for path, x in jax.tree_util.tree_leaves_with_path(shapes) if "experts" in jax.tree_util.keystr(path)]
    assert count_parameters(model).expert == sum(x.size for x in experts)


ALL_BIASES = {"qk_norm": True, "qk_norm_over": "projection", "attention": AttentionConfig(bias=True, sinks=True)}
LATENTS = {"num_key_value_heads": None, "latent": LatentConfig(kv_lora_rank=8, q_lora_rank=12)}


@pytest.mark.parametrize(
    ("data", "expert", "tensor", "whole", "model"),
    [
        (2, 4, 1, False, {}),
        (2, 2, 2, False, ALL_BIASES),
        (1, 2, 2, False, LATENTS | {"num_nextn_predict_layers": 1}),
        (2, 2, 2, True, ALL_BIASES),
        (2, 2, 2, False, {"delta_net": DeltaNetConfig(num_value_heads=4, num_key_heads=2, full_attention_interval=2)}),
        (2, 2, 2, False, {"mamba": MambaConfig(num_heads=4, d_state=6, attn_layer_period=2, attn_layer_offsets=(0,))}),
    ],
)
def test_parameters_of_a_device_are_those_of_the_real_one(data, expert, tensor, whole, model):
    moe = {"num_shared_experts": 1, "dense_residual": True, "bias": True}
    config = small_config(data, expert, tensor=tensor, model=model, experts_over_tensor=whole, **moe)
    shapes = make_trainer(config, make_mesh(config.mesh, jax.devices()[: data * expert * tensor])).state_shapes
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(shapes["params"]))
    assert parameters_per_device(config, config.mesh.sizes) == held


def test_flops_of_a_dense_step_equal_what_xla_counts():
    """XLA multiplies whole attention squares where the model needs half, and counts element-wise work too."""
    config = small_config(
        1, 1, num_experts=0, model={"hidden_size": 64, "intermediate_size": 256, "vocab_size": 256, "num_layers": 1}
    )
    trainer = make_trainer(config, make_mesh(MeshConfig(), jax.devices()[:1]))
    compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
    n = config.data.seq_len
    tokens = config.train.batch_size * n
    square = tokens * 6 * config.model.hidden_size * n
    expected = tokens * train_flops_per_token(config.model, n) + square
    assert 1.0 <= compiled.cost_analysis()["flops"] / expected <= 1.15
