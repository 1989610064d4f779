"""Nemotron-H and Nemotron 3 Nano (NVIDIA 2025): Mamba-2, between it attention without positions; experts or MLPs.

On disk each Mamba-2, attention, MLP or expert layer has a number and a norm of its own. Here an MLP or experts belong
to the block of the layer before them, and a layer that none follows is a block without (`mamba.mixer_only_offsets`).
MLPs and experts have the activation max(x, 0)² and no gate matrix; the router is that of DeepSeek-V3.
"""

from typing import Any

from moe_jax.config import AttentionConfig, MambaConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, expert_block_pattern, top_k_settings
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.mamba import NO_LIMIT, BlockParts, block_pattern, mamba_rows
from moe_jax.convert.quantized import quantization_of
from moe_jax.convert.shared import grouped_heads
from moe_jax.convert.tensors import Tensor

_MAMBA, _ATTENTION, _EXPERTS, _MLP = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "E": _EXPERTS, "-": _MLP}  # of a pattern, which older files have
_NAMES = {_MAMBA: _MAMBA, "mamba": _MAMBA, _ATTENTION: _ATTENTION, "attention": _ATTENTION}
_NAMES |= {_EXPERTS: _EXPERTS, _MLP: _MLP}
_LEAST_STEP = 0.001  # of time, to which transformers raises the steps of a prompt, but not those of generation
_ANY_STEP = 1e-9


def _model(hf: HfConfig) -> ModelConfig:
    blocks = _blocks(_layers(hf), hf.where)
    for name, *built in (("mlp_hidden_act", "relu2"), ("mlp_bias", False), ("attention_bias", False)):
        hf.only(name, *built)
    for name in ("use_bias", "residual_in_fp32", "tie_word_embeddings"):
        hf.only(name, False)
    for name in ("sliding_window", "moe_latent_size"):
        hf.only(name)
    quantization_of(hf)
    return ModelConfig(
        vocab_size=hf.whole("vocab_size"),
        hidden_size=hf.whole("hidden_size"),
        num_layers=len(blocks),
        num_attention_heads=hf.whole("num_attention_heads"),
        **grouped_heads(hf),
        intermediate_size=hf.whole("intermediate_size"),
        activation="squared_relu",
        rms_norm_eps=hf.number("layer_norm_epsilon"),
        attention=AttentionConfig(nope_every=1),
        mamba=_mamba(hf, blocks),
        moe=_experts(hf, blocks),
    )


def _layers(hf: HfConfig) -> list[str]:
    """Return the kind of each layer on disk."""
    listed = hf.listed("layers_block_type") or hf.listed("layer_types")
    if not listed and hf.has("hybrid_override_pattern"):
        listed = [_LETTERS.get(letter, letter) for letter in hf.word("hybrid_override_pattern")]
    layers = hf.with_defaults({"num_hidden_layers": len(listed)}).num_layers()
    found = [_NAMES[each] for each in listed if isinstance(each, str) and each in _NAMES]
    if not found or len(found) != len(listed) or len(found) != layers:
        raise ConvertError(
            f"{hf.where}: layers_block_type is not supported: it must have {', '.join(_LETTERS.values())} for each of "
            f"num_hidden_layers={layers}, or hybrid_override_pattern {', '.join(_LETTERS)}"
        )
    return found


def _blocks(layers: list[str], where: str) -> list[tuple[str, str | None]]:
    """Return the layers of each block: Mamba-2 or attention, and an MLP, experts or None."""
    found: list[tuple[str, str | None]] = []
    for number, layer in enumerate(layers):
        if layer in (_MAMBA, _ATTENTION):
            found.append((layer, None))
            continue
        if not found or found[-1][1] is not None:
            pattern = "".join(letter for each in layers for letter, name in _LETTERS.items() if each == name)
            raise ConvertError(
                f"{where}: layer {number} of the pattern {pattern} is an MLP or experts that follow neither Mamba-2 "
                "nor attention, which is not supported: use a model in which each follows one"
            )
        found[-1] = found[-1][0], layer
    return found


def _mamba(hf: HfConfig, blocks: list[tuple[str, str | None]]) -> MambaConfig:
    parts = [BlockParts(mixer == _ATTENTION, added is not None) for mixer, added in blocks]
    if all(part.attention for part in parts):
        if not all(part.mlp for part in parts):
            raise ConvertError(
                f"{hf.where}: layers_block_type has attention that no MLP or experts follow, and no Mamba-2, which is "
                "not supported: use a model with Mamba-2"
            )
        return MambaConfig()
    for name, *built in (
        *(("mamba_hidden_act", "silu"), ("use_conv_bias", True), ("mamba_proj_bias", False)),
        ("time_step_limit", *NO_LIMIT),
    ):
        hf.only(name, *built)
    if (least := hf.number("time_step_min", _LEAST_STEP)) > _LEAST_STEP:
        raise ConvertError(f"{hf.where}: time_step_min={least} is not supported: it must be at most {_LEAST_STEP}")
    return MambaConfig(
        num_heads=hf.whole("mamba_num_heads"),
        head_dim=hf.whole("mamba_head_dim"),
        n_groups=hf.whole("n_groups", "mamba_n_groups"),
        d_state=hf.whole("ssm_state_size"),
        d_conv=hf.whole("conv_kernel", "mamba_d_conv"),
        **block_pattern(parts),
    )


def _experts(hf: HfConfig, blocks: list[tuple[str, str | None]]) -> MoEConfig:
    if all(added != _EXPERTS for _, added in blocks):
        return MoEConfig(num_experts=0)
    pattern = expert_block_pattern([None if added is None else added == _EXPERTS for _, added in blocks])
    if pattern is None:
        raise ConvertError(
            f"{hf.where}: layers_block_type with both moe and mlp is not supported: MLPs must be below all experts, "
            "and above them in all blocks but every n-th"
        )
    hf.only("n_shared_experts", 1)
    width, shared = hf.whole("moe_intermediate_size"), hf.whole("moe_shared_expert_intermediate_size")
    if not shared or not width or shared % width:
        raise ConvertError(
            f"{hf.where}: moe_shared_expert_intermediate_size={shared} is not supported: it must be a multiple of "
            f"moe_intermediate_size={width}, at least that"
        )
    return MoEConfig(
        num_experts=hf.whole("n_routed_experts", "num_local_experts"),
        **top_k_settings(hf, hf.flag("norm_topk_prob", True)),
        intermediate_size=width,
        num_shared_experts=shared // width,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        gate="deepseek_v3",
        n_group=hf.whole("n_group"),
        topk_group=hf.whole("topk_group"),
        first_k_dense_replace=pattern[0],
        moe_layer_freq=pattern[1],
        capacity_factor=None,
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    mamba, moe, layers = model.mamba, model.moe, []
    for kind, view in zip(model.block_kinds[: model.num_layers], model.views, strict=False):
        layers.append(_MAMBA if view.recurrent == "mamba" else _ATTENTION)
        if view.has_mlp:
            layers.append(_EXPERTS if kind == "moe" else _MLP)
    own: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": len(layers),
        "layers_block_type": layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "attention_bias": False,
        "intermediate_size": model.intermediate_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "layer_norm_epsilon": model.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    if model.has_mamba:
        own |= {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_dim,
            "n_groups": mamba.n_groups,
            "ssm_state_size": mamba.d_state,
            "conv_kernel": mamba.d_conv,
            "mamba_hidden_act": "silu",
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": _ANY_STEP,
        }
    if moe.num_experts:
        own |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.divides_by_sum,
            "moe_intermediate_size": moe.intermediate_size,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": moe.intermediate_size * moe.num_shared_experts,
            "routed_scaling_factor": moe.routed_scaling_factor,
            "n_group": moe.n_group,
            "topk_group": moe.topk_group,
        }
    return own


def _ends(model: ModelConfig, root: str) -> list[Tensor]:
    return [
        Tensor(f"{root}.embeddings.weight", "embedding", "vocab model"),
        Tensor(f"{root}.norm_f.weight", "norm", "model"),
        Tensor("lm_head.weight", "head", "vocab model"),
    ]


def _numbers(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the number on disk of each block's Mamba-2 or attention, and of the layer after it."""
    found, layer = [], 0
    for view in model.views:
        found.append((layer, layer + 1))
        layer += 1 + view.has_mlp
    return found


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    heads = {"q": ("query", "heads.head"), "k": ("key", "kv_heads.head"), "v": ("value", "kv_heads.head")}
    return [
        Tensor("norm.weight", "attention.norm", "model"),
        *(Tensor(f"mixer.{n}_proj.weight", f"attention.{own}", f"{axis} model") for n, (own, axis) in heads.items()),
        Tensor("mixer.o_proj.weight", "attention.out", "model heads.head"),
        *_added(model, kind),
    ]


def _mamba_block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [Tensor("norm.weight", "attention.norm", "model"), *mamba_rows(model, "mixer"), *_added(model, kind)]


def _added(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of an MLP or of experts."""
    norm = Tensor("norm.weight", "norm", "model")
    if kind == "dense":
        return [norm, *_mlp_rows("mixer", "mlp")]
    return [
        norm,
        Tensor("mixer.gate.weight", "moe.router", "choices model", float32=True),
        Tensor("mixer.gate.e_score_correction_bias", "moe.score_bias", "choices", float32=True),
        *_mlp_rows("mixer.experts.{expert}", "moe.experts"),
        *_mlp_rows("mixer.shared_experts", "moe.shared"),
    ]


def _mlp_rows(name: str, path: str) -> list[Tensor]:
    return [
        Tensor(f"{name}.up_proj.weight", f"{path}.squared_up", "hidden model"),
        Tensor(f"{name}.down_proj.weight", f"{path}.down", "model hidden"),
    ]


_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _model,
    _settings,
    _block,
    _DEFAULTS,
    recurrent_block=_mamba_block,
    root="backbone",
    ends=_ends,
    numbers=_numbers,
)
