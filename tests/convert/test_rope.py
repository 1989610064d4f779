"""Rotary embedding as config.json has it, of transformers 4 and 5, and of both."""

import dataclasses
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.config import RopeScalingConfig
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.hf_config import ConvertError, HfConfig, read_config
from moe_jax.convert.rope import rope_settings
from moe_jax.models.rope import logit_scale
from tests.convert.golden import changed, logits_in, model_of, of_transformers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}


def settings(**values: object) -> tuple[float, RopeScalingConfig]:
    found = rope_settings(HfConfig({"max_position_embeddings": 64, **values}, "config.json"))
    return found["rope_theta"], found["rope_scaling"]


def test_scaling_that_was_added_to_a_file_of_transformers_5_counts(tmp_path):
    found = logits_in(changed("qwen3_moe", tmp_path, rope_scaling=YARN))
    expected = of_transformers("qwen3_moe_yarn")
    np.testing.assert_allclose(found[:, -expected.shape[1] :, ::4], expected, rtol=0, atol=3e-5)


def test_rope_scaling_is_looked_at_first():
    yarn = settings(rope_scaling=YARN)
    assert yarn[1].rope_type == "yarn"
    assert settings(rope_scaling=YARN, rope_parameters=DEFAULT) == yarn
    assert settings(rope_scaling=YARN, rope_parameters=YARN) == yarn
    assert settings(rope_scaling=YARN, rope_parameters=YARN | {"rope_theta": 5e5}, rope_theta=5e5) == (5e5, yarn[1])
    assert settings(rope_scaling={}, rope_parameters=YARN) == yarn
    assert settings(rope_scaling=None, rope_parameters=YARN) == yarn


@pytest.mark.parametrize(
    ("scaling", "parameters", "message"),
    [
        (
            YARN,
            DEFAULT | {"rope_theta": 1e6},
            "rope_scaling makes model.rope_theta=10000, and rope_parameters makes it 1e+06",
        ),
        (
            YARN,
            YARN | {"factor": 2.0},
            "rope_scaling makes model.rope_scaling=rope_type=yarn, factor=4, original_max_position_embeddings=16, "
            "attention_factor=1.13863, and rope_parameters makes it rope_type=yarn, factor=2, "
            "original_max_position_embeddings=16, "
            "attention_factor=1.06931",
        ),
        (
            {"type": "default"},
            {"rope_type": "linear", "factor": 2.0},
            "rope_scaling makes model.rope_scaling=rope_type=none, and rope_parameters makes it rope_type=linear, "
            "factor=2",
        ),
    ],
)
def test_two_settings_that_disagree_are_refused(scaling, parameters, message):
    with pytest.raises(ConvertError) as refusal:
        settings(rope_scaling=scaling, rope_parameters=parameters)
    cure = "write the same rope_theta and scaling into both, or remove rope_scaling"
    assert str(refusal.value) == f"config.json: {message}: {cure}"


def test_a_rotation_of_each_kind_of_block_is_refused():
    with pytest.raises(
        ConvertError, match="rope_parameters: full_attention is not supported: all blocks must have one"
    ):
        settings(rope_parameters={"full_attention": DEFAULT, "sliding_attention": DEFAULT})


def test_the_original_length_of_the_file_counts_first():
    assert settings(rope_scaling=YARN, original_max_position_embeddings=32)[1].original_max_position_embeddings == 32
    assert settings(rope_scaling=YARN)[1].original_max_position_embeddings == 16
    del (without := dict(YARN))["original_max_position_embeddings"]
    assert settings(rope_scaling=without)[1].original_max_position_embeddings == 64


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_deepseek_scales_its_logits_with_every_kind_of_scaling(kind, tmp_path):
    """By (0.1·m·ln(factor) + 1)², which may as well be in the queries' last matrix."""
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, "attention_factor": 1.0}
    rope |= {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    scaled = changed("deepseek_v3", tmp_path / "a", rope_parameters=rope | {"mscale_all_dim": 0.8})
    plain = changed("deepseek_v3", tmp_path / "b", rope_parameters=rope)
    tensors = load_file(plain / "model.safetensors")
    factor = (0.08 * math.log(4) + 1) ** 2
    for name in [name for name in tensors if name.endswith("q_b_proj.weight")]:
        tensors[name] *= np.float32(factor)
    save_file(tensors, plain / "model.safetensors")
    np.testing.assert_allclose(logits_in(scaled), logits_in(plain), rtol=0, atol=3e-5)
    model = FAMILIES["deepseek_v3"].model(read_config(scaled))
    assert logit_scale(model) == pytest.approx(factor * model.qk_width**-0.5)
    assert FAMILIES["deepseek_v3"].model(HfConfig(FAMILIES["deepseek_v3"].settings(model), "")).rope_scaling == (
        model.rope_scaling
    )


def test_other_families_scale_rotated_features_only():
    """`mscale` and `mscale_all_dim` then only say by how much."""
    _, scaling = settings(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5})
    assert scaling.mscale_all_dim == 0
    assert scaling.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    model = dataclasses.replace(model_of("qwen3_moe"), rope_scaling=scaling)
    family = FAMILIES["qwen3_moe"]
    assert family.model(HfConfig(family.settings(model), "")) == model
