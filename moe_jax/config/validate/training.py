"""Rules for training, the log and tuning."""

import difflib

from moe_jax.config.grouped_products import AUTO, KERNELS, passes_of
from moe_jax.config.sections import Sections
from moe_jax.config.validate.ranges import setting
from moe_jax.errors import ConfigError

# settings that must not be empty, and what they name
_NAMES = {
    "schedule.task_times": "file",
    "tune.cache": "file",
    "plan.cluster": "cluster",
    "train.init_from": "folder",
    "train.record_routing": "folder",
    "train.replay_routing": "folder",
    "log.wandb_project": "project",
    "log.goodput_job": "job",
}


def check_training(config: Sections) -> None:
    """Raise ConfigError for empty names, settings that contradict each other, and a step that is never reached."""
    if not config.log.dir:
        raise ConfigError("log.dir is empty: name the folder that receives the run")
    for name, kind in _NAMES.items():
        if setting(config, name) == "":
            raise ConfigError(f"{name} is empty: name a {kind}, or null")
    if not config.checkpoint.safety_copies_dir:
        raise ConfigError("checkpoint.safety_copies_dir is empty: name a folder in memory, e.g. /dev/shm")
    if config.checkpoint.safety_copies_every and not config.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.safety_copies_every={config.checkpoint.safety_copies_every} makes copies to resume from, "
            "which checkpoint.resume=false refuses: use checkpoint.resume=true, or checkpoint.safety_copies_every=0"
        )
    if config.train.upcycle and config.train.init_from is None:
        raise ConfigError(
            "train.upcycle=true needs a dense model to begin with: set train.init_from, or train.upcycle=false"
        )
    if config.train.upcycle and config.model.moe.num_experts == 0:
        raise ConfigError(
            "train.upcycle=true makes experts, and model.moe.num_experts=0: set it, or train.upcycle=false"
        )
    _check_grouped_product(config.train.grouped_product)
    _check_trace(config)
    _check_routing(config)
    if config.train.skip_spikes and config.train.spike_factor is None:
        raise ConfigError(
            "train.skip_spikes=true skips what train.spike_factor=null does not name: give a factor, e.g. "
            "train.spike_factor=3, or use train.skip_spikes=false"
        )


def _check_grouped_product(name: str) -> None:
    if name == AUTO or passes_of(name):
        return
    near = difflib.get_close_matches(name, (AUTO, *KERNELS), n=1) if "+" not in name else []
    cure = f": did you mean {near[0]}?" if near else f", or three of them joined by +, as in {'+'.join(KERNELS[:3])}"
    raise ConfigError(f"train.grouped_product={name} must be {AUTO} or {' or '.join(KERNELS)}{cure}")


def _check_routing(config: Sections) -> None:
    record, replay, moe = config.train.record_routing, config.train.replay_routing, config.model.moe
    for name, folder in (("train.record_routing", record), ("train.replay_routing", replay)):
        if folder is None:
            continue
        if moe.num_experts == 0:
            raise ConfigError(f"{name}={folder} is for routers, and model.moe.num_experts=0: use {name}=null")
        if config.step_facts.has_ticks:
            raise ConfigError(
                f"{name}={folder} is not for pipelines, and mesh.pipeline={config.mesh.pipeline}: use mesh.pipeline=1 "
                "without coscheduled passes"
            )
        if moe.gate_facts.decides != "top_k":
            raise ConfigError(
                f"{name}={folder} is for tokens that choose experts, and model.moe.gate={moe.gate} lets experts "
                f"choose: use another gate, or {name}=null"
            )
    if replay is not None and "bias_update_rate" not in moe.gate_facts.settings:
        raise ConfigError(
            f"train.replay_routing={replay} needs a gate with a bias on its choice, and model.moe.gate={moe.gate} has "
            "none: use model.moe.gate=softmax, sigmoid or deepseek_v3"
        )
    if replay is not None and replay == record:
        raise ConfigError(
            f"train.replay_routing={replay} would be replaced by train.record_routing={record}: use two folders"
        )


def _check_trace(config: Sections) -> None:
    traced, steps = config.log.trace_step, config.train.steps
    if traced is None:
        return
    value = f"log.trace_step={traced[0] if len(traced) == 1 else list(traced)}"
    if len(traced) not in (1, 2) or traced[0] > traced[-1]:
        raise ConfigError(f"{value} must be a step, or the first and the last of several, e.g. [10, 13] (or null)")
    if traced[0] < 2:  # the first step includes the process's start-up
        raise ConfigError(f"{value} must be at least 2 (or null)")
    if traced[-1] > steps:
        raise ConfigError(f"{value} is never reached with train.steps={steps}: use {traced[-1]} steps or more, or null")


def check_tune(config: Sections) -> None:
    """Raise ConfigError if tuning varies a setting that has no effect, lists one twice, or meets another change of the
    step's program.
    """
    over, schedule, later = config.tune.over, config.schedule, config.model.moe.capacity_schedule
    if schedule.profile_steps and (over or later):
        other = f"tune.over=[{', '.join(over)}]" if over else "model.moe.capacity_schedule"
        raise ConfigError(
            f"schedule.profile_steps={schedule.profile_steps} measures one program, and {other} changes it: "
            "use schedule.profile_steps=0, or drop the other"
        )
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
