"""Granite 4 (IBM 2025): Mamba-2, between it attention, mostly without positions; experts with a shared MLP.

Models without experts have the shared MLP alone.
"""

from typing import Any

from moe_jax.config import AttentionConfig, MambaConfig, ModelConfig, MoEConfig
from moe_jax.convert.family import Family, attention_rows, norm_rows, top_k_settings
from moe_jax.convert.granitemoe import expert_rows, factors, granite_settings, input_rows
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.mamba import NO_LIMIT, BlockParts, block_pattern, mamba_rows
from moe_jax.convert.shared import grouped_heads, shared_settings
from moe_jax.convert.tensors import Tensor

# in layer_types, and other names of the same that transformers has
_MAMBA, _ATTENTION = "mamba", "attention"
_NAMES = {_MAMBA: _MAMBA, "linear_attention": _MAMBA, _ATTENTION: _ATTENTION, "full_attention": _ATTENTION}


def _model(hf: HfConfig) -> ModelConfig:
    hf.only("position_embedding_type", "rope", "nope")
    shared, has_experts = hf.whole("shared_intermediate_size"), hf.whole("num_local_experts", "num_experts") > 0
    has_rope = hf.has("position_embedding_type") and hf.word("position_embedding_type") == "rope"
    return ModelConfig(
        **shared_settings(hf),
        **grouped_heads(hf),
        **factors(hf),
        intermediate_size=ModelConfig.intermediate_size if has_experts else shared,
        attention=AttentionConfig(bias=hf.flag("attention_bias", False), nope_every=None if has_rope else 1),
        mamba=_mamba(hf),
        moe=_experts(hf, shared) if has_experts else MoEConfig(num_experts=0),
    )


def _experts(hf: HfConfig, shared: int) -> MoEConfig:
    width = hf.whole("intermediate_size")
    if not shared or not width or shared % width:
        raise ConvertError(
            f"{hf.where}: shared_intermediate_size={shared} is not supported: it must be a multiple of "
            f"intermediate_size={width}, at least that"
        )
    return MoEConfig(
        num_experts=hf.whole("num_local_experts", "num_experts"),
        **top_k_settings(hf, normalized=True),
        intermediate_size=width,
        num_shared_experts=shared // width,
        capacity_factor=None,
    )


def _mamba(hf: HfConfig) -> MambaConfig:
    """Return the settings of the Mamba-2 layers, if a block has one."""
    layers, listed = hf.num_layers(), hf.listed("layer_types")
    types = [_NAMES.get(each) if isinstance(each, str) else None for each in listed or [_MAMBA] * layers]
    if None in types or len(types) != layers:
        raise ConvertError(
            f"{hf.where}: layer_types is not supported: it must have {_MAMBA!r} or {_ATTENTION!r} for each of "
            f"num_hidden_layers={layers}"
        )
    if _MAMBA not in types:
        return MambaConfig()
    hf.only("mamba_proj_bias", False)
    hf.only("mamba_conv_bias", True)
    hf.only("time_step_limit", *NO_LIMIT)
    heads, width = hf.whole("mamba_n_heads"), hf.whole("mamba_expand") * hf.whole("hidden_size")
    if not heads or width % heads:
        raise ConvertError(
            f"{hf.where}: mamba_n_heads={heads} is not supported: it must divide mamba_expand × hidden_size = {width}"
        )
    head_dim = width // heads
    hf.only("mamba_d_head", "auto", head_dim)
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        n_groups=hf.whole("mamba_n_groups"),
        d_state=hf.whole("mamba_d_state"),
        d_conv=hf.whole("mamba_d_conv"),
        **block_pattern([BlockParts(attention=each == _ATTENTION) for each in types]),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    mamba, moe = model.mamba, model.moe
    has_experts = moe.num_experts > 0
    own: dict[str, Any] = {
        "layer_types": [_MAMBA if view.is_recurrent else _ATTENTION for view in model.views],
        "position_embedding_type": "nope" if model.attention.nope_every == 1 else "rope",
        "shared_intermediate_size": (
            moe.intermediate_size * moe.num_shared_experts if has_experts else model.intermediate_size
        ),
    }
    if not has_experts:
        own |= {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": model.intermediate_size}
    if not model.has_mamba:
        own["mamba_n_heads"] = 1  # transformers refuses its default, 128, for some widths
    else:
        own |= {
            "mamba_n_heads": mamba.num_heads,
            "mamba_d_head": mamba.head_dim,
            "mamba_expand": mamba.value_width // model.hidden_size,
            "mamba_n_groups": mamba.n_groups,
            "mamba_d_state": mamba.d_state,
            "mamba_d_conv": mamba.d_conv,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }
    return granite_settings(model) | own


def _block(model: ModelConfig, kind: str) -> list[Tensor]:
    return [*attention_rows(model), *_mlp(model, kind)]


def _mamba_block(model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with Mamba-2."""
    return [*norm_rows(model), *mamba_rows(model, "mamba"), *_mlp(model, kind)]


def _mlp(model: ModelConfig, kind: str) -> list[Tensor]:
    if kind == "dense":
        return _shared_rows("mlp", model.intermediate_size)
    moe = model.moe
    return [*expert_rows(model), *_shared_rows("moe.shared", moe.intermediate_size * moe.num_shared_experts)]


def _shared_rows(path: str, hidden: int) -> list[Tensor]:
    """Return the rows of the shared MLP, whose gate and up matrices are one tensor."""
    down = Tensor("shared_mlp.output_linear.weight", f"{path}.down", "model hidden")
    return [*input_rows("shared_mlp.input_linear.weight", path, hidden, "hidden model"), down]


_DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _model,
    _settings,
    _block,
    _DEFAULTS,
    recurrent_block=_mamba_block,
)
