"""Multi-token prediction on disk, as DeepSeek-V3 stores it: a further block above the last one.

The block has norms and a matrix for its input, and a last norm. It also has copies of the embedding and the head, which
it shares with the decoder. transformers reads none of its tensors.
"""

from collections.abc import Collection

from moe_jax.config import ModelConfig
from moe_jax.convert.tensors import Tensor

INPUT_ROWS = [
    Tensor("enorm.weight", "mtp_input.embedding_norm", "model"),
    Tensor("hnorm.weight", "mtp_input.hidden_norm", "model"),
    Tensor("eh_proj.weight", "mtp_input.projection", "model joined"),
]
LAST_NORM = Tensor("shared_head.norm.weight", "mtp_norm", "model")


def prefix(model: ModelConfig) -> str:
    """Return the beginning of the names of the block's tensors."""
    return f"model.layers.{model.num_layers}."


def has_module(names: Collection[str], model: ModelConfig) -> bool:
    """Whether files with these tensors have a module of multi-token prediction above a model's blocks."""
    return f"{prefix(model)}eh_proj.weight" in names


def has_foreign_module(names: Collection[str]) -> bool:
    """Whether files with these tensors have a module as Qwen3-Next stores it, which is not read."""
    return any(name.startswith("mtp.") for name in names)


def copy_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of the block's copies of the embedding and the head."""
    head = "embedding" if model.tie_word_embeddings else "head"
    return [
        Tensor("embed_tokens.weight", "embedding", "vocab model"),
        Tensor("shared_head.head.weight", head, "vocab model"),
    ]


def copies(model: ModelConfig) -> dict[str, str]:
    """Return the names of these copies, and those of the tensors that they are copies of."""
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    return {f"{prefix(model)}{row.name}": names[row.path] for row in copy_rows(model)} if model.has_mtp else {}
