"""Qwen3.5 with experts (Qwen Team 2026): Qwen3-Next with experts in all blocks, and other tensors for its delta nets.

One tensor of a delta net has the queries of all heads, then the keys, then the values; gates, rates and steps have one
each. The published models also see images; only their language model is read and written, without its settings for
positions in images, which do not affect text.
"""

from collections.abc import Sequence
from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.convert import qwen3_next
from moe_jax.convert.family import Family, norm_rows
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.tensors import AxisPart, Tensor

_ONLY = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attn_output_gate": True}


def _model(hf: HfConfig) -> ModelConfig:
    for name, built in _ONLY.items():
        hf.only(name, built)
    return qwen3_next.FAMILY.read(hf)


def _settings(model: ModelConfig) -> dict[str, Any]:
    return qwen3_next.FAMILY.settings(model) | {"attn_output_gate": True}


def _delta_block(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with a delta net."""
    delta, name = model.delta_net, "linear_attn.in_proj_"
    widths = (delta.key_width, delta.key_width, delta.value_width)
    return [
        *norm_rows(model),
        *_parts(f"{name}qkv.weight", ("query", "key", "value"), widths),
        *(
            Tensor(f"{name}{part}.weight", f"attention.{path}", "kv_heads.head model")
            for part, path in (("z", "gate"), ("b", "rate"), ("a", "step"))
        ),
        *qwen3_next.delta_rows(),
        *qwen3_next.mlp_or_experts(model, kind),
    ]


def _parts(name: str, paths: Sequence[str], widths: Sequence[int]) -> list[Tensor]:
    """Return the rows of our arrays that are one tensor, one array after the other."""
    begins = [sum(widths[:place]) for place in range(len(widths))]
    return [
        Tensor(name, f"attention.{path}", "kv_heads.head model", within=AxisPart(begin, sum(widths)))
        for path, begin in zip(paths, begins, strict=True)
    ]


# it has no dense blocks, and so no width of them
_DEFAULTS = {**qwen3_next.FAMILY.defaults, "intermediate_size": ModelConfig().intermediate_size}
FAMILY = Family(
    *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _model, _settings, qwen3_next.FAMILY.block, _DEFAULTS),
    recurrent_block=_delta_block,
)
