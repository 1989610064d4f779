"""What a family cannot express is refused in one line that names it."""

import json

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.convert import families
from moe_jax.convert.families import FAMILIES, family_of, family_that_holds
from moe_jax.convert.hf_config import ConvertError, HfConfig
from tests.convert.golden import GOLDEN

_AS_WINDOWS = "sliding_window=8 is not supported: it must be null, or max_window_layers=1 at least num_hidden_layers=2"
_AS_BLOCKS = (
    "moe_layer_end_index=0 is not supported: dense blocks must be the lowest ones, and above them all but every n-th"
)
_AS_LISTED = "mlp_layer_types is not supported: the lowest must be dense, the others sparse"
_AS_TYPES = (
    "layer_types is not supported: of num_hidden_layers=4 every n-th must be 'full_attention', the others "
    "'linear_attention'"
)
_AS_SHARED = "is not supported: it must be a multiple of moe_intermediate_size=12, at least that"
_AS_MAMBA = "layer_types is not supported: it must have 'mamba' or 'attention' for each of num_hidden_layers=4"
_AS_STEPS = 'it must be [0.0, Infinity] or [0.0, {"__float__": "Infinity"}]'
_AS_LAYERS = "it must have linear_attention, full_attention, moe, mlp for each of num_hidden_layers"
_AS_ALPHA = "must be above 0, and at most 1e+09"
_OLDER = "hybrid_override_pattern M, *, E, -"
_WINDOWS = ["full_attention", "sliding_attention"]
_PHI = json.loads((GOLDEN / "phimoe/config.json").read_text())["rope_parameters"]
_AS_SCALES = "rope_parameters: short_mscale=1.2 and long_mscale=1.3 are not supported: they must be the same"
_AS_NTH = "num_hidden_layers=4 every n-th must be"
REFUSED = [
    ("llama4_text", "num_experts_per_tok", 2, "num_experts_per_tok=2 is not supported: it must be 1"),
    (
        "llama4_text",
        "no_rope_layers",
        [0, 1, 1, 1],
        f"no_rope_layers is not supported: of {_AS_NTH} 0, the others 1",
    ),
    (
        "llama4_text",
        "layer_types",
        ["full_attention", *["chunked_attention"] * 3],
        f"layer_types is not supported: of {_AS_NTH} 'full_attention', the others 'chunked_attention'",
    ),
    (
        "llama4_text",
        "moe_layers",
        [0, 1, 3],
        "moe_layers=[0, 1, 3] is not supported: above the lowest blocks, every n-th must have experts",
    ),
    (
        "llama4_text",
        "attention_chunk_size",
        None,
        "layer_types has 'chunked_attention', and attention_chunk_size is null: set it",
    ),
    ("llama4_text", "attn_temperature_tuning", "yes", 'attn_temperature_tuning="yes" must be true or false'),
    ("phimoe", "num_experts_per_tok", 3, "num_experts_per_tok=3 is not supported: it must be 2"),
    ("phimoe", "rope_parameters", _PHI | {"long_mscale": 1.3}, _AS_SCALES),
    (
        "phimoe",
        "rope_parameters",
        _PHI | {"long_factor": [1, "2"]},
        'rope_parameters: long_factor=[1, "2"] must be a list of numbers',
    ),
    ("glm4_moe", "scoring_func", "softmax", 'scoring_func="softmax" is not supported: it must be "sigmoid"'),
    ("glm4_moe", "topk_method", "greedy", 'topk_method="greedy" is not supported: it must be "noaux_tc"'),
    ("glm4_moe", "hidden_act", "gelu", 'hidden_act="gelu" is not supported: it must be "silu"'),
    ("dots1", "max_window_layers", 1, _AS_WINDOWS),
    ("dots1", "layer_types", _WINDOWS, "layer_types is not supported: all must be full_attention"),
    ("minimax_m2", "qk_norm_type", "per_head", 'qk_norm_type="per_head" is not supported: it must be "per_layer"'),
    ("minimax_m2", "use_qk_norm", False, "use_qk_norm=false is not supported: it must be true"),
    ("minimax_m2", "use_routing_bias", False, "use_routing_bias=false is not supported: it must be true"),
    ("minimax_m2", "shared_intermediate_size", 64, "shared_intermediate_size=64 is not supported: it must be 0"),
    ("minimax_m2", "attn_type_list", [1, 0], "attn_type_list has 0, which is not supported: all must be 1"),
    ("minimax_m2", "layernorm_mlp_beta", 3.5, "layernorm_mlp_beta=3.5 is not supported: it must be 1.0"),
    ("hunyuan_v1_moe", "moe_layer_num_skipped", 1, "moe_layer_num_skipped=1 is not supported: it must be 0"),
    ("ernie4_5_moe", "use_bias", True, "use_bias=true is not supported: it must be false"),
    ("ernie4_5_moe", "moe_norm_min", 0.1, "moe_norm_min=0.1 is not supported: it must be at most 1e-06"),
    ("ernie4_5_moe", "moe_layer_end_index", 0, _AS_BLOCKS),
    ("glm4_moe_lite", "first_k_dense_replace", 3, "first_k_dense_replace=3 is not supported: it must be 1"),
    ("glm4_moe_lite", "mlp_layer_types", ["sparse", "dense"], _AS_LISTED),
    ("deepseek_v32", "mlp_layer_types", ["sparse", "dense", "sparse"], _AS_LISTED),
    ("deepseek_v32", "first_k_dense_replace", 2, "first_k_dense_replace=2 is not supported: it must be 1"),
    (
        "deepseek_v32",
        "layer_types",
        ["full_attention"] * 3,
        "layer_types is not supported: all must be indexed_attention",
    ),
    ("deepseek_v32", "rope_interleave", False, "rope_interleave=false is not supported: it must be true"),
    ("glm_moe_dsa", "scoring_func", "softmax", 'scoring_func="softmax" is not supported: it must be "sigmoid"'),
    ("hunyuan_v1_moe", "moe_topk", [2, 3], "moe_topk is not supported: it must be the same in all blocks"),
    *[
        ("hunyuan_v1_moe", "rope_parameters", {"alpha": alpha}, f"rope_parameters: alpha={alpha:g} {_AS_ALPHA}")
        for alpha in (-1.5, 0, 1e300)
    ],
    ("hunyuan_v1_moe", "use_cla", True, "use_cla=true is not supported: it must be false"),
    ("qwen3_next", "attention_bias", True, "attention_bias=true is not supported: it must be false"),
    ("qwen3_next", "layer_types", [["full_attention"]], _AS_TYPES),
    ("qwen3_next", "layer_types", ["full_attention", *["linear_attention"] * 3], _AS_TYPES),
    ("qwen3_5_moe_text", "mlp_only_layers", [1], "mlp_only_layers=[1] is not supported: it must be []"),
    ("qwen3_5_moe_text", "norm_topk_prob", False, "norm_topk_prob=false is not supported: it must be true"),
    ("qwen3_5_moe_text", "attn_output_gate", False, "attn_output_gate=false is not supported: it must be true"),
    ("qwen3_5_moe_text", "decoder_sparse_step", 2, "decoder_sparse_step=2 is not supported: it must be 1"),
    ("qwen3_next", "shared_expert_intermediate_size", 0, f"shared_expert_intermediate_size=0 {_AS_SHARED}"),
    ("qwen2_moe", "shared_expert_intermediate_size", 0, f"shared_expert_intermediate_size=0 {_AS_SHARED}"),
    ("qwen2_moe", "shared_expert_intermediate_size", 18, f"shared_expert_intermediate_size=18 {_AS_SHARED}"),
    ("granitemoehybrid", "mamba_proj_bias", True, "mamba_proj_bias=true is not supported: it must be false"),
    ("granitemoehybrid", "mamba_conv_bias", False, "mamba_conv_bias=false is not supported: it must be true"),
    ("granitemoehybrid", "mamba_d_head", 8, 'mamba_d_head=8 is not supported: it must be "auto" or 16'),
    (
        "granitemoehybrid",
        "mamba_n_heads",
        6,
        "mamba_n_heads=6 is not supported: it must divide mamba_expand × hidden_size = 64",
    ),
    ("granitemoehybrid", "time_step_limit", [0.0, 1.0], f"time_step_limit=[0.0, 1.0] is not supported: {_AS_STEPS}"),
    ("granitemoehybrid", "layer_types", ["mamba"], _AS_MAMBA),
    ("granitemoehybrid", "layer_types", ["mamba", "attention", "moe", "mamba"], _AS_MAMBA),
    ("granitemoehybrid", "layer_types", ["mamba", "attention", ["attention"], 3], _AS_MAMBA),
    (
        "granitemoehybrid",
        "position_embedding_type",
        "learned",
        'position_embedding_type="learned" is not supported: it must be "rope" or "nope"',
    ),
    (
        "granitemoehybrid",
        "shared_intermediate_size",
        0,
        "shared_intermediate_size=0 is not supported: it must be a multiple of intermediate_size=12, at least that",
    ),
    *(
        ("nemotron_h", name, True, f"{name}=true is not supported: it must be false")
        for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings")
    ),
    ("nemotron_h", "use_conv_bias", False, "use_conv_bias=false is not supported: it must be true"),
    ("nemotron_h", "mlp_hidden_act", "silu", 'mlp_hidden_act="silu" is not supported: it must be "relu2"'),
    ("nemotron_h", "moe_latent_size", 8, "moe_latent_size=8 is not supported: it must be null"),
    ("nemotron_h", "n_shared_experts", 0, "n_shared_experts=0 is not supported: it must be 1"),
    ("nemotron_h", "time_step_min", 0.01, "time_step_min=0.01 is not supported: it must be at most 0.001"),
    ("nemotron_h", "time_step_limit", [0.0, 1.0], f"time_step_limit=[0.0, 1.0] is not supported: {_AS_STEPS}"),
    (
        "nemotron_h",
        "moe_shared_expert_intermediate_size",
        18,
        "moe_shared_expert_intermediate_size=18 is not supported: it must be a multiple of moe_intermediate_size=12, "
        "at least that",
    ),
    (
        "nemotron_h",
        "layers_block_type",
        ["moe", "linear_attention"],
        "layer 0 of the pattern EM is an MLP or experts that follow neither Mamba-2 nor attention, which is not "
        "supported: use a model in which each follows one",
    ),
    (
        "nemotron_h",
        "layers_block_type",
        ["linear_attention", "mlp", "mlp"],
        "layer 2 of the pattern M-- is an MLP or experts that follow neither Mamba-2 nor attention, which is not "
        "supported: use a model in which each follows one",
    ),
    (
        "nemotron_h",
        "layers_block_type",
        ["linear_attention", "moe", "full_attention", "mlp"],
        "layers_block_type with both moe and mlp is not supported: MLPs must be below all experts, and above them in "
        "all blocks but every n-th",
    ),
    (
        "nemotron_h",
        "layers_block_type",
        ["full_attention", "full_attention", "moe"],
        "layers_block_type has attention that no MLP or experts follow, and no Mamba-2, which is not supported: use a "
        "model with Mamba-2",
    ),
    *(
        (
            "nemotron_h",
            "layers_block_type",
            layers,
            f"layers_block_type is not supported: {_AS_LAYERS}={count}, or {_OLDER}",
        )
        for layers, count in ((["linear_attention", "conv"], 2), ([["moe"], 3], 2), ([], 0))
    ),
    ("nemotron_h", "num_hidden_layers", 9, f"layers_block_type is not supported: {_AS_LAYERS}=9, or {_OLDER}"),
    ("ernie4_5_moe", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported: it must be 1.0"),
]


def settings_of(family: str, **others: object) -> HfConfig:
    return HfConfig(json.loads((GOLDEN / family / "config.json").read_text()) | others, "config.json")


@pytest.mark.parametrize(("family", "name", "value", "message"), REFUSED)
def test_a_setting_that_is_not_built_is_refused_by_name(family, name, value, message):
    others = {"sliding_window": 8, "layer_types": None} if name == "max_window_layers" else {}
    settings = settings_of(family, **others, **{name: value})
    with pytest.raises(ConvertError) as refusal:
        family_of(settings).model(settings)
    assert str(refusal.value) == f"config.json: {message}"


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_rotations_that_are_not_built_are_refused_by_name(kind):
    for section in ("rope_scaling", "rope_parameters"):
        others = {"rope_scaling": None, "rope_parameters": None, section: {"type": kind, "factor": 2.0}}
        with pytest.raises(ConvertError) as refusal:
            FAMILIES["glm4_moe"].model(settings_of("glm4_moe", **others))
        assert str(refusal.value) == (
            f'config.json: {section}: rope_type="{kind}" is not supported: it must be linear, llama3, yarn'
        )


def test_families_that_are_not_built_are_refused_with_the_reason():
    with pytest.raises(ConvertError, match=r"model_type='minimax' is not supported, since there is no lightning"):
        family_of(settings_of("mixtral", model_type="minimax"))
    with pytest.raises(
        ConvertError, match=r"model_type='longcat_flash' is not supported, since there is no block with"
    ):
        family_of(settings_of("mixtral", model_type="longcat_flash"))
    with pytest.raises(ConvertError, match=r"model_type='new' is not supported: it must be mixtral, llama, "):
        family_of(settings_of("mixtral", model_type="new"))


def test_no_family_is_both_built_and_not() -> None:
    assert not set(families._NOT_BUILT) & set(families._BY_TYPE)


def rotated(**others: object) -> float:
    """The share of GLM-4.5's heads that is rotated, for other settings than those of the file."""
    return FAMILIES["glm4_moe"].model(settings_of("glm4_moe", **others)).partial_rotary_factor


def test_the_rotated_share_is_found_wherever_it_is_written():
    """As in transformers: in the section, else at the top level, else the family's default."""
    assert rotated() == 0.5
    assert rotated(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 0.25
    assert rotated(rope_parameters=None) == 0.5
    assert rotated(rope_parameters=None, partial_rotary_factor=0.25) == 0.25
    assert rotated(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}) == 0.5
    assert rotated(partial_rotary_factor=0.25) == 0.5
    minimax = FAMILIES["minimax_m2"]
    older = settings_of("minimax_m2", rope_parameters=None, rope_theta=5e6, rotary_dim=4)
    assert minimax.model(older).partial_rotary_factor == 0.25
    assert minimax.model(settings_of("minimax_m2", rope_parameters=None, rotary_dim=None)).partial_rotary_factor == 1


def test_the_nearest_family_of_a_model_with_experts_has_experts() -> None:
    settings = ["model.moe.gate=xmoe", "model.moe.router_rank=5", "model.qk_norm=true"]
    with pytest.raises(ConvertError, match=r"nearest are those of qwen3_moe, which have no model\.moe\.gate=xmoe and"):
        family_that_holds(load_config(None, settings).model)
