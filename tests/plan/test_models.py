"""The configs of published models: their parameters are those that were published."""

from pathlib import Path
from typing import NamedTuple

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.plan.resources import count_parameters, train_flops_per_token

FOLDER = Path(__file__).parents[2] / "configs/models"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


class Published(NamedTuple):
    """Counts as published. An int is exact; text counts billions, rounded or cut."""

    source: str
    total: int | str
    active: int | str | None = None
    input_embedding_active: bool = True  # whether the active parameters have the embedding of the input among them
    elsewhere: int = 0  # of the total, what the config leaves out


# Totals of safetensors are those that the models' pages at huggingface.co give as "model size", to the parameter.
PUBLISHED = {
    "deepseek_v2": Published("safetensors; report, abstract: 21B", 235_741_434_880, "21"),
    "deepseek_v3": Published("report, abstract: 671B, 37B", "671", "37", input_embedding_active=False),
    "kimi_k2": Published("safetensors: 1.03T; model card: 32B", "1026", "32", input_embedding_active=False),
    "mixtral_8x7b": Published("safetensors; report, section 2: 12.9B (13B in its tables)", 46_702_792_704, "12.9"),
    "mixtral_8x22b": Published("safetensors; announcement: 141B, 39B", 140_620_634_112, "39"),
    "qwen3_30b_a3b": Published("safetensors; report, section 2: 3.3B", 30_532_122_624, "3.3"),
    "qwen3_235b_a22b": Published("safetensors; report, section 2: 22B", 235_093_634_560, "22"),
    # vision: config.json's 34 blocks of width 1408 and a projector, the same in both
    "llama4_scout": Published("safetensors: 109B; model card: 17B", 108_641_793_536, "17", elsewhere=871_932_416),
    "llama4_maverick": Published("safetensors: 402B; model card: 17B", 401_583_781_376, "17", elsewhere=871_932_416),
    # announcement: "10B dense transformer with a residual 128×3.66B MoE MLP resulting in 480B total and 17B active"
    "arctic": Published("safetensors: 479B; announcement: 17B", "479", "17"),
    "olmoe": Published("safetensors; paper, table 1: 1.3B", 6_919_161_856, "1.3"),
    "gpt_oss_20b": Published(
        "safetensors; model card, table 1: 3.61B", 20_914_757_184, "3.61", input_embedding_active=False
    ),
    # with the block that predicts one more token, a copy of the embedding and of the head in it
    "glm_4_5": Published("safetensors: 358B; report: 32B", "358", "32", False, elsewhere=5_539_962_272),
    "glm_4_5_air": Published("safetensors; report: 12B", 110_468_824_832, "12", False, elsewhere=3_616_573_568),
    # with a scale for each block of 128 x 128 numbers in 8 bits
    "minimax_m2": Published("safetensors; model card: 10B", 228_703_644_928, "10", False, elsewhere=13_880_064),
    "qwen3_next_80b_a3b": Published("model card: 80B, 3B", "80", "3"),
    "qwen3_5_35b_a3b": Published("its name: 35B, 3B", "35", "3"),
    "phi_3_5_moe": Published("report, section 2.2: 42B, 6.6B", "42", "6.6"),
    "granite_4_0_h_small": Published("model card: 32B, 9B", "32", "9"),
    "nemotron_3_nano_30b_a3b": Published("report, section 2: 31.6B, 3.6B", "31.6", "3.6"),
    "ernie_4_5_21b_a3b": Published("model card: 21B, 3B", "21", "3"),
    "gpt_oss_120b": Published(
        "safetensors; model card, table 1: 5.13B", 116_829_156_672, "5.13", input_embedding_active=False
    ),
}

# FlowMoE, table 2, in millions: multi-head attention with gates, and experts.
FLOWMOE = {
    "gpt2_tiny_moe": (3.2, 50.4),
    "bert_large_moe": (25.2, 806.5),
    "llama2_moe": (134.2, 4297.6),
    "llama2_moe_l": (268.4, 8595.2),
    "deepseek_v2_s": (419.6, 2014.1),
    "deepseek_v2_m": (734.3, 3524.7),
}
# The others are named by a paper whose sizes are those of a known model.
TOTALS = {
    "gpt2_xl_moe": 1.56e9 + 48 * 7 * 2 * 1600 * 6400,  # GPT-2 XL, seven more MLPs in each block
    "gpt2_s_moe": 124e6 + 6 * 31 * 2 * 768 * 3072,  # GPT-2 small, 31 more MLPs in every other block
    "gpt2_l_moe": 355e6 + 12 * 31 * 2 * 1024 * 4096,  # GPT-2 with 24 blocks of width 1024
    "mixtral_7b": 46_702_792_704,
    "mixtral_22b": 140_620_634_112,
    "2x70b": 68_976_648_192 + 80 * 3 * 8192 * 28672,  # Llama 2 70B, a second MLP in each block
}


def model_of(name: str):
    return load_config(FOLDER / f"{name}.yaml").model


def assert_is(count: int, published: int | str, what: str) -> None:
    """Equal to an exact number, or to the digits of a rounded or cut one."""
    if isinstance(published, int):
        assert count == published, what
    else:
        unit = 10.0 ** -len(published.partition(".")[2])
        assert float(published) - unit / 2 <= count / 1e9 < float(published) + unit, what


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    model, published = model_of(name), PUBLISHED[name]
    counts = count_parameters(model)
    assert_is(counts.total + published.elsewhere, published.total, f"total, {published.source}")
    if published.active is not None:
        unseen = 0 if published.input_embedding_active else model.hidden_size * model.vocab_size
        assert_is(counts.active - unseen, published.active, f"active, {published.source}")


@pytest.mark.parametrize("name", FLOWMOE)
def test_counts_of_experts_and_attention_are_those_of_flowmoe(name: str) -> None:
    """The paper does not say which vectors it counts besides the matrices of attention, 4M² + ME."""
    model, (attention, experts) = model_of(name), FLOWMOE[name]
    counts = count_parameters(model)
    assert counts.expert / 1e6 == pytest.approx(experts, rel=0.002)
    assert counts.heads_and_hidden / 1e6 == pytest.approx(attention, rel=0.02)


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_those_of_the_models_they_are_made_of(name: str) -> None:
    assert count_parameters(model_of(name)).total == pytest.approx(TOTALS[name], rel=0.005)


def test_every_config_has_a_count_to_hold() -> None:
    assert sorted([*PUBLISHED, *FLOWMOE, *TOTALS]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_token_costs_six_operations_for_each_active_parameter_and_its_attention(name: str) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    counts = count_parameters(config.model)
    flops = train_flops_per_token(config.model, config.data.seq_len)
    assert 6 * counts.matrix_active < flops < 9 * counts.matrix_active
    assert counts.matrix_active < counts.active <= counts.total
