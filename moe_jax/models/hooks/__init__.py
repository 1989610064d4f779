"""Functions around the MoE layer and its exchanges: one file each, as `Hooks`."""

from moe_jax.config import MoE
from moe_jax.errors import ConfigError
from moe_jax.models.hooks import bf16, fp8
from moe_jax.models.hooks.protocol import Hooks
from moe_jax.named import named

HOOKS = {"none": Hooks(), "bf16": bf16.HOOKS, "fp8": fp8.HOOKS}


def hooks_of(moe: MoE) -> Hooks:
    """Those that a config names. Raises ConfigError if they are none."""
    hooks = named("model.moe.hooks", moe.hooks, HOOKS)
    if not isinstance(hooks, Hooks):
        raise ConfigError(
            f"model.moe.hooks={moe.hooks} is of type {type(hooks).__name__}: name a moe_jax.models.hooks.protocol.Hooks"
        )
    return hooks
