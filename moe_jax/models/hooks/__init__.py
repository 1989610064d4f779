"""Functions around the MoE layer and its exchanges: one file each, as `Hooks`."""

from moe_jax.config import MoE
from moe_jax.models.hooks import bf16, fp8
from moe_jax.models.hooks.protocol import Hooks

HOOKS = {"none": Hooks(), "bf16": bf16.HOOKS, "fp8": fp8.HOOKS}


def hooks_of(moe: MoE) -> Hooks:
    """Those that a config asks for."""
    return HOOKS[moe.hooks]
