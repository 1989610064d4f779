"""Rules for recurrent layers: gated delta nets and Mamba-2."""

import dataclasses
from typing import Any

from moe_jax.config.sections import MambaConfig, ModelConfig
from moe_jax.errors import ConfigError, as_yaml, divisors_text


def check_delta_nets(model: ModelConfig) -> None:
    """Raise ConfigError for invalid heads of delta nets, or for their settings without them."""
    delta, name = model.delta_net, "model.delta_net"
    if model.has_delta_nets:
        heads = delta.num_value_heads or 0
        if heads % delta.key_heads:
            raise ConfigError(
                f"{name}.num_key_heads={delta.num_key_heads} does not divide {name}.num_value_heads={heads}: "
                f"use {divisors_text(heads)}"
            )
        return
    _check_unused(delta, name, "num_value_heads")


def check_mamba(model: ModelConfig) -> None:
    """Raise ConfigError for invalid heads, groups or places of Mamba-2, or for its settings without it."""
    mamba, name = model.mamba, "model.mamba"
    if not model.has_mamba:
        _check_unused(mamba, name, "num_heads")
        return
    heads = mamba.num_heads or 0
    if model.has_delta_nets:
        raise ConfigError(
            f"{name}.num_heads={heads} and model.delta_net.num_value_heads={model.delta_net.num_value_heads} are two "
            f"kinds of recurrent layers: use {name}.num_heads=null, or model.delta_net.num_value_heads=null"
        )
    if heads % mamba.n_groups:
        raise ConfigError(
            f"{name}.n_groups={mamba.n_groups} does not divide {name}.num_heads={heads}: use {divisors_text(heads)}"
        )
    _check_places(mamba, name)


def _check_places(mamba: MambaConfig, name: str) -> None:
    """Raise ConfigError for invalid places of blocks with attention, or of those without an MLP or experts."""
    period, offsets, mixers = mamba.attn_layer_period, list(mamba.attn_layer_offsets), list(mamba.mixer_only_offsets)
    if period is None:
        for setting, value in (("attn_layer_offsets", offsets), ("mixer_only_offsets", mixers)):
            if value:
                raise ConfigError(
                    f"{name}.{setting}={value} without {name}.attn_layer_period: set both, or {name}.{setting}=[]"
                )
        return

    def are_places(values: list[int]) -> bool:
        return values == sorted(set(values)) and all(0 <= each < period for each in values)

    if not are_places(mixers):
        raise ConfigError(
            f"{name}.mixer_only_offsets={mixers} with {name}.attn_layer_period={period}: use places from 0 to "
            f"{period - 1} in growing order"
        )
    if not (offsets or mixers) or not are_places(offsets) or len(offsets) == period:
        raise ConfigError(
            f"{name}.attn_layer_offsets={offsets} with {name}.attn_layer_period={period}: use some places from 0 to "
            f"{period - 1} in growing order, {name}.attn_layer_period=null for attention in no block, or "
            f"{name}.num_heads=null for attention in all"
        )


def _check_unused(section: Any, name: str, needed: str) -> None:
    """Raise ConfigError for a setting of a section that has no effect without the one that is needed."""
    for field in dataclasses.fields(section):
        if (value := getattr(section, field.name)) != field.default:
            value, cure = as_yaml(value), as_yaml(field.default)
            raise ConfigError(
                f"{name}.{field.name}={value} without {name}.{needed}: set both, or {name}.{field.name}={cure}"
            )
