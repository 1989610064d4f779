"""DeepSeek-V3.2 (2025) and GLM-5 (Z.ai 2026): DeepSeek-V3 whose tokens attend to those that an indexer chooses.

Here they attend to all tokens before them, which is the same for the first `index_topk` tokens of a sequence. The
indexers are not read, and an export is a DeepSeek-V3.
"""

import dataclasses

from moe_jax.config import ModelConfig
from moe_jax.convert import deepseek_v3
from moe_jax.convert.deepseek import lowest_dense_blocks
from moe_jax.convert.family import Unread
from moe_jax.convert.hf_config import ConvertError, HfConfig

_INDEXED = "indexed_attention"


def _model(hf: HfConfig) -> ModelConfig:
    layers, types = hf.num_layers(), hf.listed("layer_types")
    if types and types != [_INDEXED] * layers:
        raise ConvertError(f"{hf.where}: layer_types is not supported: all must be {_INDEXED}")
    dense = lowest_dense_blocks(hf, default=min(hf.whole("first_k_dense_replace"), layers))
    hf.whole("index_topk")  # for the note
    hf.only("first_k_dense_replace", dense)  # transformers ignores it if there is a list
    return deepseek_v3.FAMILY.read(hf.with_values({"first_k_dense_replace": dense}))


def _full_attention(hf: HfConfig, tensors: int) -> str:
    most = hf.whole("index_topk")
    return (
        f"attention is full, not to index_topk={most} tokens that an indexer chooses: the same for the first {most} "
        f"tokens of a sequence; {tensors} tensors of indexers are not read, and exports are of deepseek_v3"
    )


_DEFAULTS = {**deepseek_v3.FAMILY.defaults, "max_position_embeddings": 163_840, "index_topk": 2048}
_GLM_5 = {"max_position_embeddings": 202_752, "n_group": 1, "topk_group": 1, "q_lora_rank": 2048}
_FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY, read=_model, aliases=(), unread=Unread(".self_attn.indexer.", _full_attention)
)
FAMILIES = {
    "deepseek_v32": dataclasses.replace(_FAMILY, defaults=_DEFAULTS),
    "glm_moe_dsa": dataclasses.replace(_FAMILY, defaults=_DEFAULTS | _GLM_5),
}
