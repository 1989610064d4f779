"""The definition of a family of Hugging Face models, and the table rows and settings that several families share.

A family converts config.json and has a table with a row for each tensor of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.tensors import Tensor


class Unread(NamedTuple):
    """Tensors of a family's blocks that are not read."""

    part: str  # of their names
    message: Callable[[HfConfig, int], str]  # what that means, for the number of these tensors


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: str  # the name of transformers' class
    read: Callable[[HfConfig], ModelConfig]  # converts config.json; raises ConvertError for unsupported settings
    settings: Callable[[ModelConfig], dict[str, Any]]  # the inverse, for a model of this family
    block: Callable[[ModelConfig, str], list[Tensor]]  # the table rows of a block of a kind, `dense` or `moe`
    defaults: Mapping[str, Any]  # transformers' defaults for missing settings, where families differ
    holds_mtp: bool = False  # whether its files may have a module of multi-token prediction (mtp.py)
    aliases: tuple[str, ...] = ()  # further `model_type`s with the same settings, tensors and function
    # the rows of a block with a recurrent layer instead of attention; None: the family has none
    recurrent_block: Callable[[ModelConfig, str], list[Tensor]] | None = None
    root: str = "model"  # the beginning of the names of tensors on disk, but the head's
    # the rows of tensors outside blocks, for this beginning; None: `unstacked_rows`
    ends: Callable[[ModelConfig, str], list[Tensor]] | None = None
    # for each block the numbers on disk of its attention, and of its MLP or experts; None: those of the block
    numbers: Callable[[ModelConfig], list[tuple[int, int]]] | None = None
    unread: Unread | None = None

    def model(self, hf: HfConfig) -> ModelConfig:
        """Return the model of a config.json. Raises ConvertError for unsupported settings."""
        return self.read(hf.with_defaults(self.defaults))

    def rows(self, model: ModelConfig, kind: str, view: AttentionView) -> list[Tensor]:
        """Return the table rows of a block of a kind with a view of attention."""
        block = self.recurrent_block if view.is_recurrent else self.block
        assert block is not None, "models with recurrent layers are of families that have them"
        return [row for row in block(model, kind) if view.has_mlp or row.path.startswith("attention.")]


def unstacked_rows(model: ModelConfig, root: str) -> list[Tensor]:
    """Return the rows of tensors outside blocks: the embedding, the last norm and the head."""
    head = [] if model.tie_word_embeddings else [Tensor("lm_head.weight", "head", "vocab model")]
    return [
        Tensor(f"{root}.embed_tokens.weight", "embedding", "vocab model"),
        *_norm_rows(model, f"{root}.norm", ""),
        *head,
        *([Tensor("lm_head.bias", "head_bias", "vocab")] if model.head_bias else []),
    ]


def norm_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of a block's two norms: before attention, and before the MLP or experts."""
    return [
        *_norm_rows(model, "input_layernorm", "attention."),
        *_norm_rows(model, "post_attention_layernorm", ""),
    ]


def _norm_rows(model: ModelConfig, name: str, place: str) -> list[Tensor]:
    bias = [Tensor(f"{name}.bias", f"{place}norm_bias", "model")] if model.normalization == "layernorm" else []
    return [Tensor(f"{name}.weight", f"{place}norm", "model"), *bias]


def attention_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of grouped-query attention and of the block's norms."""
    heads = {"q": ("query", "heads.head"), "k": ("key", "kv_heads.head"), "v": ("value", "kv_heads.head")}
    rows = [
        Tensor(f"self_attn.{n}_proj.weight", f"attention.{own}", f"{axis} model") for n, (own, axis) in heads.items()
    ]
    rows.append(Tensor("self_attn.o_proj.weight", "attention.out", "model heads.head"))
    if model.attention.bias:
        rows += [Tensor(f"self_attn.{n}_proj.bias", f"attention.{own}_bias", axis) for n, (own, axis) in heads.items()]
        if model.attention.out_bias:
            rows.append(Tensor("self_attn.o_proj.bias", "attention.out_bias", "model"))
    if model.qk_norm:
        over_projection = model.qk_norm_over == "projection"
        rows += [
            Tensor(f"self_attn.{n}_norm.weight", f"attention.{own}_norm", axis if over_projection else "head")
            for n, (own, axis) in heads.items()
            if n != "v"
        ]
    return [*norm_rows(model), *rows]


def mlp_rows(
    name: str, path: str, matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Tensor]:
    """Return the rows of an MLP; if its `name` on disk contains {expert}, of one MLP for each expert."""
    gate, up, down = matrices
    return [
        Tensor(f"{name}.{gate}.weight", f"{path}.gate", "hidden model"),
        Tensor(f"{name}.{up}.weight", f"{path}.up", "hidden model"),
        Tensor(f"{name}.{down}.weight", f"{path}.down", "model hidden"),
    ]


def expert_rows(model: ModelConfig) -> list[Tensor]:
    """Return the rows of a router and its experts, with the names of most families."""
    return [
        Tensor("mlp.gate.weight", "moe.router", "choices model"),
        *mlp_rows("mlp.experts.{expert}", "moe.experts"),
    ]


def dense_or_experts(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with grouped-query attention and an MLP or experts."""
    return [*attention_rows(model), *(expert_rows(model) if kind == "moe" else mlp_rows("mlp", "mlp"))]


def dense_or_upcycled(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block of a dense family; where our model has experts, each is initialized as the MLP."""
    return [*attention_rows(model), *mlp_rows("mlp", "moe.experts" if kind == "moe" else "mlp")]


def top_k_settings(hf: HfConfig, normalized: bool) -> dict[str, Any]:
    """Return the number of experts per token (k), and whether their weights are normalized, also for k = 1."""
    top_k = hf.whole("num_experts_per_tok")
    return {"top_k": top_k, "norm_topk_prob": normalized, "norm_top1_prob": normalized and top_k == 1}


def expert_block_settings(hf: HfConfig) -> dict[str, Any]:
    """Return `first_k_dense_replace` and `moe_layer_freq` for Qwen's settings, which list the dense blocks."""
    layers, step, dense = (
        hf.num_layers(),
        max(hf.whole("decoder_sparse_step", default=1), 1),
        hf.listed("mlp_only_layers"),
    )
    found = expert_block_pattern([i not in dense and (i + 1) % step == 0 for i in range(layers)], step)
    if found is None:
        raise ConvertError(
            f"{hf.where}: mlp_only_layers={dense} with decoder_sparse_step={step} is not supported: dense blocks must "
            "be the lowest ones, and above them all but every n-th"
        )
    return {"first_k_dense_replace": found[0], "moe_layer_freq": found[1]}


def expert_block_pattern(has: Sequence[bool | None], preferred: int = 1) -> tuple[int, int] | None:
    """Return `first_k_dense_replace` and `moe_layer_freq` of blocks, or None if they follow no such pattern.

    `has` says which blocks have experts; None: a block has neither these nor an MLP, whatever the pattern says. Of
    several solutions, the one with the `preferred` frequency is returned.
    """
    own = [i for i, with_experts in enumerate(has) if with_experts]
    if not own:
        return None
    most = own[1] - own[0] if len(own) > 1 else len(has) - own[0]
    for every in (preferred, *range(most, 0, -1)):
        first = own[0] - every + 1
        if first >= 0 and all(
            wanted in (None, i >= own[0] and (i - own[0]) % every == 0) for i, wanted in enumerate(has)
        ):
            return first, every
    return None


def check_no_windows(hf: HfConfig) -> None:
    """Raise ConvertError for sliding windows, which some Qwen models use in their upper blocks."""
    hf.only("use_sliding_window", False)
