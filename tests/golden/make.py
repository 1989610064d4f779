"""Tiny random models of each family with the logits that transformers gives them; made once, and again for more.

    pip install torch transformers safetensors
    python tests/golden/make.py [--out FOLDER] [--settings JSON] [family …]

Each folder has what `save_pretrained` writes, and `golden.safetensors` with tokens and logits in float32.
`changed.safetensors` has logits of the same tensors and tokens with other settings, of the last tokens only:
`mixtral_top_1` with num_experts_per_tok=1, `qwen3_moe_yarn` (every fourth logit) with
rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} added to config.json, and
`deepseek_v32_sparse` (every fourth logit, of all tokens) with index_topk=8.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
DEEPSEEK = {
    **SHARED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
BIASED_ROUTER = {
    **SHARED,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
NEXT = {
    **SHARED,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-4,  # with 1e-6 and larger matrices, logits in float32 are 3e-5 and more from those in float64
}
INDEXER = {"q_lora_rank": 16, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_DELTA = ("Qwen3Next", "Qwen3_5MoeText")
HYBRID = {
    "intermediate_size": 12,
    "shared_intermediate_size": 24,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
NEMOTRON = {name: value for name, value in SHARED.items() if name != "num_hidden_layers"} | {
    "n_groups": 2,
    "eos_token_id": 2,
    "layer_norm_epsilon": 1e-3,  # as in NEXT
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        SHARED | {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "llama": (
        "Llama",
        SHARED
        | {
            "intermediate_size": 40,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("Qwen3", SHARED | {"intermediate_size": 40, "head_dim": 12, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_moe": (
        "Qwen3Moe",
        SHARED
        | {
            "vocab_size": 256,  # bytes, so that tests may train it
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "olmoe": (
        "Olmoe",
        SHARED | {"intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        SHARED
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 16,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "gpt_oss": (
        "GptOss",
        SHARED
        | {
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        BIASED_ROUTER
        | {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "dots1": ("Dots1", BIASED_ROUTER | {"head_dim": 8, "norm_topk_prob": True, "sliding_window": None}),
    "minimax_m2": (
        "MiniMaxM2",
        SHARED
        | {
            "head_dim": 16,
            "intermediate_size": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 8,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        SHARED
        | {
            "intermediate_size": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"}
        | {"num_hidden_layers": 2, "q_lora_rank": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        DEEPSEEK | INDEXER | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v32_2": (
        "DeepseekV32",
        DEEPSEEK
        | INDEXER
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 4,
            "index_topk": 80,
            "mlp_layer_types": ["sparse", "sparse"],
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 128,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        DEEPSEEK
        | INDEXER
        | {
            "n_group": 1,
            "topk_group": 1,
            "index_topk_pattern": "FSF",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        SHARED
        | {
            "head_dim": 8,
            "intermediate_size": 12,
            "num_experts": 8,
            "moe_topk": [3, 3],
            "tie_word_embeddings": True,
            "rope_parameters": {"type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        NEXT
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen3_next_2": (  # another size, with a dense block, as many key heads as value heads, and longer sequences
        "Qwen3Next",
        NEXT
        | {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "full_attention_interval": 2,
            "linear_num_value_heads": 3,
            "linear_num_key_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        NEXT
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen3_5_moe_text_2": (
        "Qwen3_5MoeText",
        NEXT
        | {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "shared_expert_intermediate_size": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": (
        "Phimoe",
        SHARED
        | {
            "intermediate_size": 24,
            "num_local_experts": 8,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,  # so that some tokens have several candidates
            "sliding_window": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 1.5, 3.0, 9.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # transformers has the short factors at any length: with equal ones, long sequences are those of `long_factor`
    "phimoe_2": (
        "Phimoe",
        SHARED
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "tie_word_embeddings": True,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 3.0, 6.0, 9.0],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 6.0, 9.0],
                "short_mscale": 1.1,
                "long_mscale": 1.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama4_text": (
        "Llama4Text",
        SHARED
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "intermediate_size": 12,
            "intermediate_size_mlp": 20,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
    "llama4_text_2": (
        "Llama4Text",
        SHARED
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 24,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        SHARED
        | HYBRID
        | {
            "vocab_size": 256,  # bytes, so that tests may train it
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "mamba_n_heads": 4,
            "mamba_d_state": 12,
        },
    ),
    "granitemoehybrid_2": (  # another size, with positions, groups of heads, and longer sequences
        "GraniteMoeHybrid",
        SHARED
        | HYBRID
        | {
            "num_hidden_layers": 3,
            "layer_types": ["attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        NEMOTRON
        | {
            "vocab_size": 256,  # bytes, so that tests may train it
            "hybrid_override_pattern": "MEM*EME",
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "ssm_state_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_2": (  # another size, without experts, with repeated layers of Mamba-2, and longer sequences
        "NemotronH",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"] + ["linear_attention"] * 2 + ["mlp"],
            "num_key_value_heads": 4,
            "head_dim": 12,
            "intermediate_size": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "conv_kernel": 3,
        },
    ),
    "qwen2": ("Qwen2", SHARED | {"intermediate_size": 40, "rope_parameters": {"rope_theta": 1e6}}),
    "mistral": ("Mistral", SHARED | {"intermediate_size": 40, "head_dim": 12, "sliding_window": 5}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        SHARED
        | {
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0},
        },
    ),
}


def make(family: str, out: Path, others: dict[str, Any]) -> None:
    """Write one folder, with other settings."""
    prefix, settings = FAMILIES[family]
    settings = settings | others
    config = getattr(transformers, f"{prefix}Config")(**settings, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith(("norm.weight", "norm_f.weight")):
                is_difference = prefix in _DELTA and "linear_attn" not in name  # from 1
                leaf.copy_((not is_difference) + 0.2 * torch.randn(leaf.shape))
            else:
                matrix_std = (0.7 if prefix in (*_DELTA, "NemotronH") else 1.2) * SHARED["hidden_size"] ** -0.5
                leaf.copy_((0.5 if leaf.ndim == 1 else matrix_std) * torch.randn(leaf.shape))
            if "conv1d" in name:
                leaf.mul_(8)  # norms of small features enlarge round-off
            if "dt_bias" in name and prefix == "NemotronH":
                leaf.sub_(2)  # sums of long steps enlarge round-off
            if "e_score_correction_bias" in name:
                leaf.copy_(0.3 * torch.rand(leaf.shape))
            if family == "gpt_oss" and "gate_up_proj" in name:
                leaf.mul_(4)  # so that some are clipped
            if family == "mixtral":
                leaf.copy_(leaf.bfloat16())
        tokens = torch.randint(0, settings["vocab_size"], (2, 80 if family.endswith("_2") else 24))
        logits = model(tokens).logits
    folder = out / family
    sizes = {"max_shard_size": "40KB"} if family == "mixtral" else {}
    (model.bfloat16() if family == "mixtral" else model).save_pretrained(folder, **sizes)
    save_file({"tokens": tokens.int(), "logits": logits}, folder / "golden.safetensors")
    (folder / "generation_config.json").unlink()
    print(family, f"{logits.abs().max():.2f}", sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    for family in arguments.families:
        make(family, arguments.out, arguments.settings)
