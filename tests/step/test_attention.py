"""Forms of attention in a training step: on any mesh and in any order of tasks the same function as their reference."""

import dataclasses

import pytest

from moe_jax.config import AttentionConfig, DeltaNetConfig, LatentConfig, MambaConfig, RopeScalingConfig
from tests.small import small_config
from tests.step.gradients import assert_equals_reference
from tests.step.test_tensor_axis import SCHEDULES

LATENT = LatentConfig(kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
FORMS: dict[str, dict] = {
    "latents-sinks-window": {
        "latent": dataclasses.replace(LATENT, q_lora_rank=None),
        "num_key_value_heads": None,
        "attention": AttentionConfig(sinks=True, sliding_window=4, nope_every=2),
    },
    "windows-and-no-rope-and-norm-over-projections": {
        "attention": AttentionConfig(sliding_window=3, full_every=2, nope_every=3),
        "num_layers": 3,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "partial_rotary_factor": 0.5,
        "qk_norm_after_rope": True,
    },
    "scaled-rotary-latents": {
        "latent": dataclasses.replace(LATENT, rms_norm_eps=1e-3),
        "num_key_value_heads": None,
        "rope_scaling": RopeScalingConfig(
            rope_type="yarn",
            factor=4,
            original_max_position_embeddings=64,
            attention_factor=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    },
    "delta-nets": {
        "num_layers": 5,
        "delta_net": DeltaNetConfig(
            num_value_heads=4, num_key_heads=2, key_head_dim=6, value_head_dim=5, full_attention_interval=2
        ),
        "attention": AttentionConfig(output_gate=True),
        "rms_norm_zero_centered": True,
        # at 1e-6 the reference's own gradients are off by more than the bound: a first token's output is a multiple of
        # its value, and its norm hides by how much
        "rms_norm_eps": 1e-2,
        "qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "mamba": {  # whose tensor ranks share the only group
        "num_layers": 6,
        "mamba": MambaConfig(
            num_heads=4, head_dim=5, d_state=6, d_conv=3, attn_layer_period=3, attn_layer_offsets=(1,)
        ),
        "attention": AttentionConfig(nope_every=1),
        "residual_multiplier": 0.5,
        "rms_norm_eps": 1e-2,  # see above
    },
    "mamba-groups": {
        "mamba": MambaConfig(num_heads=8, head_dim=5, n_groups=4, d_state=6),
        "rms_norm_eps": 1e-2,
    },
    "sinks-and-biases": {
        "attention": AttentionConfig(bias=True, sinks=True, sliding_window=5, out_bias=False),
        "activation": "clipped_swiglu",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.5,
    },
}
IN_TILES = ("latents-sinks-window",)  # which longer sequences have on their own
MOE: dict[str, dict] = {"sinks-and-biases": {"bias": True, "num_shared_experts": 1, "shared_gate": True}}


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        ("latents-sinks-window", "unified"),
        ("windows-and-no-rope-and-norm-over-projections", None),
        ("scaled-rotary-latents", None),
        ("delta-nets", None),
        ("delta-nets", "unified"),
        ("mamba", "unified"),
        ("mamba-groups", None),
        ("sinks-and-biases", "unified"),
    ],
)
def test_loss_and_gradients_equal_the_reference(form, schedule):
    """With heads cut over tensor ranks, and all else that a mesh cuts."""
    model = {"num_attention_heads": 4, "num_key_value_heads": 2} | FORMS[form]
    moe = {"num_experts": 4, "batch_size": 4} | MOE.get(form, {})
    config = small_config(1, 2, tensor=2, model=model, schedule=SCHEDULES.get(schedule), **moe)
    if form in IN_TILES:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, attention_kernel="tiled"))
    assert_equals_reference(config)
