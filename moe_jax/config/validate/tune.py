"""Rules of what a run may tune: it has to exist."""

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError


def check_tune(config: Sections) -> None:
    """Raise ConfigError for a setting that changes nothing, or that is named twice."""
    over, schedule = config.tune.over, config.schedule
    if len(set(over)) < len(over):
        raise ConfigError(f"tune.over=[{', '.join(over)}] names a setting twice: use each once")
    if over and config.model.moe.capacity_schedule:
        raise ConfigError(
            f"tune.over=[{', '.join(over)}] compares steps, which model.moe.capacity_schedule makes longer or shorter: "
            "use tune.over=[], or model.moe.capacity_schedule=[]"
        )
    if "bucket_cap_mb" in over and schedule.grad_reduce != "bucketed":
        raise ConfigError(
            f"tune.over has bucket_cap_mb, which cuts nothing with schedule.grad_reduce={schedule.grad_reduce}: "
            "set schedule.grad_reduce=bucketed, or leave it out"
        )
    if "microbatches" in over and schedule.policy_facts.cuts is None:
        raise ConfigError(
            f"tune.over has microbatches, of which schedule.policy={schedule.policy} has one: "
            "use schedule.policy=unified or expert_pipeline, or leave it out"
        )
    if "algorithm" in over and config.model.moe.num_experts == 0:
        raise ConfigError(
            "tune.over has algorithm, and with model.moe.num_experts=0 nothing is exchanged: "
            "set model.moe.num_experts, or leave it out"
        )
