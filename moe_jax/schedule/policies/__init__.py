"""Policies: how finely a step is cut and in which order its streams run. One file each."""

from moe_jax.config import registry
from moe_jax.schedule.policies.protocol import Policy

POLICIES: dict[str, Policy] = {name: module.POLICY for name, module in registry.POLICY_FACTS.modules().items()}
