"""Policies: how finely a step is cut and in which order its streams run. One file each."""

from moe_jax.schedule.policies import expert_pipeline, unified, vanilla
from moe_jax.schedule.policies.protocol import Policy

POLICIES: dict[str, Policy] = {
    "vanilla": vanilla.POLICY,
    "expert_pipeline": expert_pipeline.POLICY,
    "unified": unified.POLICY,
}
