"""Policies: the number of parts of a step's tasks, and the order of its streams. One file each."""

from moe_jax.config import registry
from moe_jax.schedule.policies.protocol import Policy

POLICIES: dict[str, Policy] = {name: module.POLICY for name, module in registry.POLICY_FACTS.modules().items()}
