"""Functions around the MoE layer, and codecs of its exchanges: one file each, as `Hooks`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import MoEConfig, registry
from moe_jax.config.plugins import first_line_of, guarded, load_part
from moe_jax.config.registry import NO_HOOKS
from moe_jax.errors import ConfigError
from moe_jax.models.hooks.protocol import Hooks, WireCodec

HOOKS: dict[str, Hooks] = {
    NO_HOOKS: Hooks(),
    **{name: module.HOOKS for name, module in registry.HOOKS_FACTS.modules().items()},
}


def hooks_of(moe: MoEConfig) -> Hooks:
    """Return the hooks that a config names. Raises ConfigError for an unknown name, or for invalid hooks."""
    hooks = load_part("model.moe.hooks", moe.hooks, HOOKS)
    if not isinstance(hooks, Hooks):
        raise ConfigError(
            f"model.moe.hooks={moe.hooks} is of type {type(hooks).__name__}: name a moe_jax.models.hooks.protocol.Hooks"
        )
    if moe.hooks not in HOOKS:
        _check(moe.hooks, hooks)
    return hooks


@functools.cache
def _check(name: str, hooks: Hooks) -> None:
    """Raise ConfigError for functions that take or return something else than hooks do."""
    x_TD, rows = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((24, 128), (2, 4, 128)))
    for field in Hooks._fields:
        part, hook = f"model.moe.hooks={name}: {field}", getattr(hooks, field)
        if field.endswith("_layer"):
            _same(part, "it must take rows [T, D] and return rows of the same shape and type", x_TD, hook)
            continue
        if not isinstance(hook, WireCodec):
            raise ConfigError(f"{part} is of type {type(hook).__name__}: use a moe_jax.models.hooks.protocol.WireCodec")
        form = "encode must take rows [P, …, D] and return an array that keeps P"
        sent = _traced(part, form, rows, hook.encode)
        if sent.shape[:1] != rows.shape[:1]:
            raise ConfigError(f"{part} makes {_form(sent)} of {_form(rows)}: {form}")
        form = "decode must take what encode returned and a type, and return rows [P, …, D] of this type"
        _same(part, form, rows, lambda x, codec=hook: codec.decode(codec.encode(x), x.dtype))


def _traced(part: str, form: str, x: jax.ShapeDtypeStruct, hook: Any) -> jax.ShapeDtypeStruct:
    call = guarded(part, form, hook)
    try:
        found = jax.eval_shape(lambda x: call(x), x)
    except TypeError as error:  # raised by jax for a result that is not an array
        raise ConfigError(f"{part} returns what is no array ({first_line_of(error)}): {form}") from error
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise ConfigError(f"{part} returns {type(found).__name__}: {form}")
    return found


def _same(part: str, form: str, x: jax.ShapeDtypeStruct, hook: Any) -> None:
    found = _traced(part, form, x, hook)
    if (found.shape, found.dtype) != (x.shape, x.dtype):
        raise ConfigError(f"{part} makes {_form(found)} of {_form(x)}: {form}")


def _form(x: jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{list(x.shape)}"
