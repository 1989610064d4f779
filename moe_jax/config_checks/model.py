"""Rules of a model: heads, experts and the blocks that have them."""

from typing import TYPE_CHECKING

from moe_jax.config_checks.words import divisors_text
from moe_jax.errors import ConfigError

if TYPE_CHECKING:
    from moe_jax.config import Model


def check_model(model: "Model") -> None:
    """Raise ConfigError for heads that do not divide, and for experts in no block."""
    if model.head_dim is None and model.d_model % model.num_heads:
        raise ConfigError(
            f"model.d_model={model.d_model} is not divisible by model.num_heads={model.num_heads}: "
            f"use {divisors_text(model.d_model)} heads, or set model.head_dim"
        )
    if model.head_width % 2:
        raise ConfigError(
            f"a head width of {model.head_width} is odd, and rotary embedding turns pairs: set an even model.head_dim"
        )
    if model.num_heads % model.kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}: "
            f"use {divisors_text(model.num_heads)}"
        )
    moe = model.moe
    if moe.num_experts == 0:
        return
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"model.moe.top_k={moe.top_k} must be 1..model.moe.num_experts={moe.num_experts}")
    if moe.first_dense_blocks >= model.num_layers:
        raise ConfigError(
            f"model.moe.first_dense_blocks={moe.first_dense_blocks} leaves none of model.num_layers={model.num_layers} "
            f"for experts: use 0..{model.num_layers - 1}, or model.moe.num_experts=0 for a dense model"
        )
    if moe.every > model.num_layers - moe.first_dense_blocks:
        raise ConfigError(
            f"model.moe.every={moe.every} puts experts in none of "
            f"the {model.num_layers - moe.first_dense_blocks} blocks: "
            f"use 1..{model.num_layers - moe.first_dense_blocks}, or model.moe.num_experts=0 for a dense model"
        )
