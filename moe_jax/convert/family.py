"""What a family of Hugging Face models is: its settings and its table of tensors, and rows that many tables share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_jax.config import ModelConfig
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.tensors import Tensor


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: str  # the class that transformers loads
    read: Callable[[HfConfig], ModelConfig]  # raises ConvertError for what is not built
    settings: Callable[[ModelConfig], dict[str, Any]]  # the inverse, for a model of this family
    block: Callable[[ModelConfig, str], list[Tensor]]  # of a block of a kind, `dense` or `moe`
    defaults: Mapping[str, Any]  # transformers' own for what config.json leaves out, where families differ

    def model(self, hf: HfConfig) -> ModelConfig:
        """Of a config.json. Raises ConvertError for what is not built."""
        return self.read(hf.with_defaults(self.defaults))


def end_rows(model: ModelConfig) -> list[Tensor]:
    """Of what is no block's."""
    head = [] if model.tie_word_embeddings else [Tensor("lm_head.weight", "head", "vocab model")]
    return [
        Tensor("model.embed_tokens.weight", "embedding", "vocab model"),
        Tensor("model.norm.weight", "norm", "model"),
        *head,
    ]


def norm_rows() -> list[Tensor]:
    """In front of attention, and of what is behind it."""
    return [
        Tensor("input_layernorm.weight", "attention.norm", "model"),
        Tensor("post_attention_layernorm.weight", "norm", "model"),
    ]


def attention_rows(model: ModelConfig) -> list[Tensor]:
    """Of grouped-query attention, with its norms."""
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
        of_all = model.qk_norm_over == "projection"
        rows += [
            Tensor(f"self_attn.{n}_norm.weight", f"attention.{own}_norm", axis if of_all else "head")
            for n, (own, axis) in heads.items()
            if n != "v"
        ]
    return [*norm_rows(), *rows]


def mlp_rows(
    there: str, here: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Tensor]:
    """Of an MLP, or of one for each {expert}."""
    gate, up, down = names
    return [
        Tensor(f"{there}.{gate}.weight", f"{here}.gate", "hidden model"),
        Tensor(f"{there}.{up}.weight", f"{here}.up", "hidden model"),
        Tensor(f"{there}.{down}.weight", f"{here}.down", "model hidden"),
    ]


def expert_rows(model: ModelConfig) -> list[Tensor]:
    """Of a router and its experts, as most families have them."""
    return [
        Tensor("mlp.gate.weight", "moe.router", "choices model"),
        *mlp_rows("mlp.experts.{expert}", "moe.experts"),
    ]


def dense_or_experts(model: ModelConfig, kind: str) -> list[Tensor]:
    """Of grouped-query attention, and an MLP or experts."""
    return [*attention_rows(model), *(expert_rows(model) if kind == "moe" else mlp_rows("mlp", "mlp"))]


def dense_copied(model: ModelConfig, kind: str) -> list[Tensor]:
    """Of a dense family: where the model has experts, each gets the MLP."""
    return [*attention_rows(model), *mlp_rows("mlp", "moe.experts" if kind == "moe" else "mlp")]


def chosen_experts(hf: HfConfig, normalized: bool) -> dict[str, Any]:
    """How many experts a token has, and whether their weights are divided by their sum: for k = 1, too."""
    top_k = hf.whole("num_experts_per_tok")
    return {"top_k": top_k, "norm_topk_prob": normalized, "norm_top1_prob": normalized and top_k == 1}


def blocks_with_experts(hf: HfConfig) -> dict[str, Any]:
    """`first_k_dense_replace` and `moe_layer_freq` for settings that list dense blocks, as Qwen has them."""
    layers, step, dense = (
        hf.num_layers(),
        max(hf.whole("decoder_sparse_step", default=1), 1),
        hf.listed("mlp_only_layers"),
    )
    found = places_of_experts([i not in dense and (i + 1) % step == 0 for i in range(layers)], step)
    if found is None:
        raise ConvertError(
            f"{hf.where}: mlp_only_layers={dense} with decoder_sparse_step={step} is not built: dense blocks must be "
            "the lowest ones, and above them all but every n-th"
        )
    return {"first_k_dense_replace": found[0], "moe_layer_freq": found[1]}


def places_of_experts(has: Sequence[bool], preferred: int = 1) -> tuple[int, int] | None:
    """`first_k_dense_replace` and `moe_layer_freq` of blocks of which these have experts, or None."""
    own = [i for i, with_experts in enumerate(has) if with_experts]
    if not own:
        return None
    for every in (preferred, own[1] - own[0] if len(own) > 1 else len(has) - own[0]):
        first = own[0] - every + 1
        if first >= 0 and own == list(range(own[0], len(has), every)):
            return first, every
    return None


def no_windows(hf: HfConfig) -> None:
    """Raise ConvertError for windows, which some Qwen models have in their upper blocks."""
    hf.only("use_sliding_window", False)
