"""Forms of attention in a training step: on any mesh and in any order of tasks the same function as their reference."""

import dataclasses

import pytest

from moe_jax.config import AttentionConfig, LatentConfig, MambaConfig, RopeScalingConfig
from tests.small import small_config
from tests.step.gradients import assert_equals_reference
from tests.step.test_tensor_axis import SCHEDULES

LATENT = LatentConfig(kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
FORMS: dict[str, dict] = {
    "scaled-latents-sinks-window": {
        "latent": dataclasses.replace(LATENT, q_lora_rank=None, rms_norm_eps=1e-3),
        "num_key_value_heads": None,
        "attention": AttentionConfig(sinks=True, sliding_window=4, nope_every=2),
        "rope_scaling": RopeScalingConfig(
            rope_type="yarn",
            factor=4,
            original_max_position_embeddings=64,
            attention_factor=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    },
    "windows-and-no-rope-and-norm-over-projections": {
        "attention": AttentionConfig(sliding_window=3, full_every=2, nope_every=3),
        "num_layers": 3,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "partial_rotary_factor": 0.5,
        "qk_norm_after_rope": True,
        "rms_norm_zero_centered": True,
    },
    "mamba-groups": {
        "mamba": MambaConfig(num_heads=8, head_dim=5, n_groups=4, d_state=6),
        # at 1e-6 the reference's own gradients are off by more than the bound: a first token's output is a multiple of
        # its value, and its norm hides by how much
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
IN_TILES = ("scaled-latents-sinks-window",)  # which longer sequences have on their own
MOE: dict[str, dict] = {"sinks-and-biases": {"bias": True, "num_shared_experts": 1, "shared_gate": True}}


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        ("scaled-latents-sinks-window", "unified"),
        ("windows-and-no-rope-and-norm-over-projections", None),
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
