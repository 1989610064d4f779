"""DeepSeek-V2 (2024): softmax scores; experts have groups, ranked by their best expert, or no groups."""

from typing import Any

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.convert import deepseek
from moe_jax.convert.deepseek import moe_settings
from moe_jax.convert.family import Family
from moe_jax.convert.hf_config import HfConfig

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("topk_method", _GREEDY, _GROUPED)
    hf.only("scoring_func", "softmax")
    hf.only("norm_topk_prob", False)
    grouped = hf.word("topk_method", _GREEDY) == _GROUPED
    return ModelConfig(
        **deepseek.model_settings(hf),
        moe=MoEConfig(
            **moe_settings(hf, normalized=False),
            gate="deepseek_v2",
            n_group=hf.whole("n_group") if grouped else 1,
            topk_group=hf.whole("topk_group") if grouped else 1,
        ),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return deepseek.settings(model) | {
        "topk_method": _GROUPED if model.moe.n_group > 1 else _GREEDY,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }


_DEFAULTS = {"max_position_embeddings": 2048, "n_shared_experts": 2, "q_lora_rank": 1536}
FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", _model, _settings, deepseek.block, _DEFAULTS)
