"""Optimizers: one file each, one signature (`protocol.Scale`)."""

from moe_jax.config import registry
from moe_jax.step.optimizers.protocol import Scale

OPTIMIZERS: dict[str, Scale] = {name: module.scale for name, module in registry.OPTIMIZER_FACTS.modules().items()}
