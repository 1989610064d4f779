"""What config.json leaves out is what transformers takes for it, and how long sequences may be that are exported."""

import dataclasses
import json
from pathlib import Path

import pytest

from moe_jax.config import Config, DataConfig, DeltaNetConfig, MambaConfig, ModelConfig, RopeScalingConfig, TrainConfig
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.source import ORIGIN, longest_sequence, model_in
from tests.convert.golden import GOLDEN, NAMES, changed

HEADS = 64
# transformers 5.23, and 5.24 from dots1 on: rope_theta, num_key_value_heads (latents have none),
# max_position_embeddings
DEFAULTS = {
    "mixtral": (1e6, 8, 131_072),
    "llama": (1e4, HEADS, 2048),
    "qwen3": (1e4, 32, 32_768),
    "qwen3_moe": (1e4, 4, 32_768),
    "olmoe": (1e4, HEADS, 4096),
    "qwen2_moe": (1e4, 16, 32_768),
    "deepseek_v3": (1e4, HEADS, 4096),
    "deepseek_v2": (1e4, HEADS, 2048),
    "gpt_oss": (150_000, 8, 131_072),
    "dots1": (1e4, 32, 2048),
    "glm4_moe": (1e4, 8, 131_072),
    "minimax_m2": (5e6, 8, 196_608),
    "glm4_moe_lite": (1e4, HEADS, 202_752),
    "hunyuan_v1_moe": (1e4, HEADS, 2048),
    "qwen2": (1e4, 32, 32_768),
    "mistral": (1e4, 8, 131_072),
    "granitemoe": (1e4, HEADS, 2048),
    "ernie4_5_moe": (5e5, 4, 131_072),
    "llama4_text": (5e5, 8, 131_072),
    "phimoe": (1e6, 8, 131_072),
    "qwen3_next": (1e4, 2, 32_768),
    "qwen3_5_moe_text": (1e4, 2, 32_768),
    "granitemoehybrid": (1e4, HEADS, 2048),
    "nemotron_h": (None, 8, 4096),  # without positions
}


def without(name: str, *settings: str, **others: object) -> ModelConfig:
    """The model of a golden config.json without some settings, with others."""
    values = json.loads((GOLDEN / name / "config.json").read_text()) | {"num_attention_heads": HEADS, "head_dim": 8}
    return FAMILIES[name].model(HfConfig({k: v for k, v in values.items() if k not in settings} | others, name))


@pytest.mark.parametrize("name", NAMES)
def test_families_have_defaults_of_their_own(name):
    theta, kv_heads, longest = DEFAULTS[name]
    left_out = ("rope_parameters", "num_key_value_heads", "max_position_embeddings", "original_max_position_embeddings")
    model = without(name, *left_out)
    assert model.kv_heads == kv_heads
    assert without(name, *left_out, num_key_value_heads=None).kv_heads == HEADS, "null is not left out"
    if theta is None:
        assert not any(view.rope for view in model.views)
        assert FAMILIES[name].defaults["max_position_embeddings"] == longest
        return
    assert model.rope_theta == theta
    scaled = without(name, *left_out, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert (scaled.rope_scaling.original_max_position_embeddings, scaled.rope_theta) == (longest, theta)


def test_gpt_oss_is_scaled_unless_it_states_otherwise():
    yarn = without("gpt_oss", "rope_parameters").rope_scaling
    assert (yarn.rope_type, yarn.factor, yarn.original_max_position_embeddings, yarn.truncate) == (
        "yarn",
        32,
        4096,
        False,
    )
    assert without("gpt_oss", rope_parameters={"rope_type": "default"}).rope_scaling == RopeScalingConfig()


def test_kimi_k2_is_a_deepseek_v3(tmp_path):
    """With YaRN that has no ramp, as published, and no groups."""
    rope = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0}
    settings = {"rope_parameters": None, "rope_scaling": rope, "n_group": 1, "topk_group": 1}
    folders = [
        changed("deepseek_v3", tmp_path / name, model_type=name, **settings) for name in ("kimi_k2", "deepseek_v3")
    ]
    kimi, deepseek = (model_in(folder) for folder in folders)
    assert kimi == deepseek
    assert (kimi.moe.n_group, kimi.rope_scaling.slow_turns, kimi.rope_scaling.fast_turns) == (1, 1.0, 1.0)


def test_deepseek_v3_has_groups_and_latents_by_default():
    model = without("deepseek_v3", "n_group", "topk_group", "first_k_dense_replace", "q_lora_rank", "n_shared_experts")
    moe = model.moe
    assert (moe.n_group, moe.topk_group, moe.first_k_dense_replace, moe.num_shared_experts) == (8, 4, 3, 1)
    assert model.latent.q_lora_rank == 1536
    assert without("deepseek_v3", q_lora_rank=None).latent.q_lora_rank is None


def test_qwen3_next_has_delta_nets_in_three_of_four_blocks_by_default():
    names = [f"linear_{name}" for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")]
    model = without("qwen3_next", *names, "linear_conv_kernel_dim", "layer_types", "rope_parameters", "norm_topk_prob")
    assert model.delta_net == DeltaNetConfig(num_value_heads=32, num_key_heads=16)
    assert [view.is_recurrent for view in model.views] == [True, True, True, False]
    assert (model.partial_rotary_factor, model.moe.norm_topk_prob) == (0.25, True)
    two = without("qwen3_next", "layer_types", full_attention_interval=2)
    assert [view.is_recurrent for view in two.views] == [True, False, True, False]
    only = [
        without("qwen3_next", layer_types=["full_attention"] * 4),
        without("qwen3_next", "layer_types", full_attention_interval=1),
    ]
    assert not any(model.has_delta_nets for model in only)
    assert without("qwen3_next", layer_types=["linear_attention"] * 4).delta_net.full_attention_interval is None


def test_granite_4_has_mamba_in_all_blocks_by_default_and_elsewhere_as_listed():
    names = [f"mamba_{name}" for name in ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "expand")]
    rest = ("layer_types", "shared_intermediate_size", "num_local_experts", "num_experts_per_tok")
    model = without("granitemoehybrid", *names, *rest, hidden_size=256, intermediate_size=512)
    assert model.mamba == MambaConfig(num_heads=128, head_dim=4, d_state=256)
    assert all(view.is_recurrent for view in model.views)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.num_shared_experts) == (8, 2, 2)

    def mamba_of(types: str) -> MambaConfig:
        listed = [{"m": "mamba", "a": "attention"}[each] for each in types]
        model = without("granitemoehybrid", layer_types=listed, num_hidden_layers=len(types))
        assert "".join("m" if view.is_recurrent else "a" for view in model.views) == types
        return model.mamba

    attention = without("granitemoehybrid", layer_types=["attention"] * 4)
    assert not attention.has_mamba
    assert FAMILIES["granitemoehybrid"].settings(attention)["mamba_n_heads"] == 1, "which divides any width"
    published = mamba_of("mmmmmammmm" * 4)
    assert (published.attn_layer_period, published.attn_layer_offsets) == (10, (5,))
    irregular = mamba_of("mmmmmmmmmmammammmammmmmmmmmammmm")
    assert (irregular.attn_layer_period, irregular.attn_layer_offsets) == (28, (10, 13, 17, 27))
    assert mamba_of("am").attn_layer_period == 2


NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def test_nemotron_h_has_the_layers_of_its_pattern_or_list():
    """And its blocks are Mamba-2 or attention, each with the MLP or experts after it, if there are any."""

    def of_pattern(pattern: str) -> ModelConfig:
        settings = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        model = without("nemotron_h", "layers_block_type", **settings)
        added = {"dense": "-", "moe": "E"}
        blocks = zip(model.block_kinds, model.views, strict=True)
        letters = [("M" if view.is_recurrent else "*") + added[kind] * view.has_mlp for kind, view in blocks]
        assert "".join(letters) == pattern
        back = FAMILIES["nemotron_h"].settings(model)
        assert FAMILIES["nemotron_h"].model(HfConfig(back, "")) == model
        return model

    published = of_pattern(NEMOTRON_3_NANO)
    assert published.mamba.attn_layer_offsets == (3, 7, 11, 15, 19, 24)
    assert published.mamba.mixer_only_offsets == (2, 6, 10, 14, 18, 23)
    assert (published.num_layers, published.mamba.attn_layer_period) == (29, 27)
    of_8b = of_pattern("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-")
    assert (of_8b.moe.num_experts, of_8b.num_mlp_blocks, of_8b.num_layers) == (0, 24, 28)
    of_pattern("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-")
    assert not of_pattern("*-*-").has_mamba
    assert of_pattern("MM").mamba.mixer_only_offsets == (0,)
    assert of_pattern("M-*-MEME").moe.first_k_dense_replace == 2
    assert of_pattern("M-MM*-ME").moe.num_experts == 8
    older = {"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4}
    assert without("nemotron_h", **older) == of_pattern("ME*E")


def test_granite_4_has_positions_only_if_it_says_so():
    assert without("granitemoehybrid", "position_embedding_type").attention.nope_every == 1
    assert without("granitemoehybrid", position_embedding_type="nope").attention.nope_every == 1
    assert without("granitemoehybrid", position_embedding_type="rope").attention.nope_every is None


def test_exports_have_the_length_of_the_import_or_of_the_training(tmp_path: Path):
    """A model that began at random has the length of its training, or that to which its positions are scaled."""

    def longest(seq_len: int, begun: Path | None = None, **model: object) -> int:
        train = TrainConfig(init_from=None if begun is None else str(begun))
        return longest_sequence(
            Config(model=ModelConfig(**model), data=DataConfig(seq_len=seq_len), train=train), tmp_path / "run"
        )

    (tmp_path / ORIGIN).write_text((GOLDEN / "olmoe" / "config.json").read_text())
    for folder in (GOLDEN / "olmoe", tmp_path):
        assert [longest(16, folder), longest(100, folder)] == [64, 100]
    assert longest(100) == 100
    scaling = RopeScalingConfig(rope_type="llama3", factor=8, original_max_position_embeddings=32)
    assert [longest(100, rope_scaling=scaling), longest(999, rope_scaling=scaling)] == [256, 999]
    assert longest(16, GOLDEN / "llama", rope_scaling=dataclasses.replace(scaling, factor=2)) == 64, "as it was given"


@pytest.mark.parametrize("bias", [False, True])
def test_a_glm_with_or_without_biases_is_a_valid_model(bias: bool) -> None:
    """Its output projection never has one, which only a model with biases has to say."""
    settings = json.loads((GOLDEN / "glm4_moe" / "config.json").read_text()) | {"attention_bias": bias}
    attention = FAMILIES["glm4_moe"].model(HfConfig(settings, "glm4_moe")).attention
    assert (attention.bias, attention.out_bias) == (bias, not bias)
