"""Rules for the optimizer and for the settings that only some optimizers read."""

import dataclasses
import functools
import re

from moe_jax.config.ranges import check_number
from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.config.sections import TOKEN_AXES, ModelConfig, OptimizerConfig, ParameterGroup, Sections
from moe_jax.config.validate.ranges import RANGES
from moe_jax.errors import ConfigError, all_of

_LEAST_CYCLE = 2  # steps from one restart to the next: one at the peak and one at the end


@functools.lru_cache(maxsize=256)
def check_optimizer(settings: OptimizerConfig, steps: int) -> None:
    """Raise ConfigError for a setting that the optimizer or the schedule does not read, or more restarts than steps.

    Cached, because a plan makes thousands of configs.
    """
    for field in dataclasses.fields(settings):
        name, value, unset = field.name, getattr(settings, field.name), field.default
        readers = tuple(part for part, facts in OPTIMIZER_FACTS.items() if name in facts.settings)
        if readers and value != unset and settings.name in OPTIMIZER_FACTS and settings.name not in readers:
            raise ConfigError(
                f"optimizer.{name}={value} is of optimizer {all_of(readers)}, and optimizer.name={settings.name}: "
                f"set optimizer.name={readers[0]}, or optimizer.{name}={unset}"
            )
    _check_schedule(settings, steps)
    _check_zero_axes(settings)
    if settings.offload_moments and settings.name not in OPTIMIZER_FACTS:
        raise ConfigError(
            f"optimizer.offload_moments=true updates some blocks of an array at a time, and optimizer.name="
            f"{settings.name} may need more at once: use a built-in optimizer, or optimizer.offload_moments=false"
        )
    for number, group in enumerate(settings.groups):
        _check_group(f"optimizer.groups[{number}]", group)


def _check_schedule(settings: OptimizerConfig, steps: int) -> None:
    for name, reader in (("decay_fraction", "wsd"), ("restarts", "cosine")):
        value, unset = getattr(settings, name), getattr(OptimizerConfig, name)
        if value != unset and settings.schedule != reader:
            raise ConfigError(
                f"optimizer.{name}={value} is of optimizer.schedule={reader}, and optimizer.schedule="
                f"{settings.schedule}: use optimizer.schedule={reader}, or optimizer.{name}={unset}"
            )
    end = OptimizerConfig.final_fraction
    if settings.schedule == "constant" and settings.final_fraction != end:
        raise ConfigError(
            f"optimizer.final_fraction={settings.final_fraction} ends a decay, which optimizer.schedule=constant does "
            f"not have: use optimizer.schedule=cosine, linear or wsd, or optimizer.final_fraction={end}"
        )
    after_warmup = steps - settings.warmup_steps
    most = max(after_warmup // _LEAST_CYCLE - 1, 0)
    if settings.restarts > most:
        raise ConfigError(
            f"optimizer.restarts={settings.restarts} in the {max(after_warmup, 0)} steps of train.steps={steps} after "
            f"the warm-up leaves less than {_LEAST_CYCLE} steps between two: use optimizer.restarts={most} or less"
        )


def _check_zero_axes(settings: OptimizerConfig) -> None:
    axes = settings.zero_axes
    if axes is None:
        return
    text = f"optimizer.zero_axes=[{', '.join(axes)}]"
    if not axes:
        raise ConfigError(f"{text} shards over nothing: name a mesh axis, or use null for all axes")
    if twice := next((axis for axis in axes if axes.count(axis) > 1), None):
        raise ConfigError(f"{text} has {twice} twice: name each axis once")
    if not settings.zero:
        raise ConfigError(
            f"{text} is where optimizer.zero shards, and optimizer.zero=0 shards nothing: use optimizer.zero=1, 2 or "
            "3, or optimizer.zero_axes=null"
        )


def check_sharding_axes(config: Sections) -> None:
    """Raise ConfigError if the axes over which ZeRO shards have one rank each, though others have more.

    An axis of size -1 may have several ranks.
    """
    axes, sizes = config.optimizer.zero_axes, config.mesh.sizes
    if axes is None or any(sizes[axis] != 1 for axis in axes):
        return
    if larger := [axis for axis in TOKEN_AXES if sizes[axis] != 1]:
        raise ConfigError(
            f"optimizer.zero_axes=[{', '.join(axes)}] shards over nothing, since this mesh has one rank along "
            f"{'it' if len(axes) == 1 else 'each'}: use optimizer.zero_axes=[{', '.join(larger)}], or null for all axes"
        )


def check_qk_clip(settings: OptimizerConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a model's attention has no logits that weights of queries and keys bound."""
    if settings.qk_clip is None:
        return
    normed, recurrent = "whose norms make logits independent of the size of these weights", "which has no logits"
    for is_set, name, reason in (
        (model.qk_norm, "qk_norm=true", normed),
        (model.qk_l2_norm, "qk_l2_norm=true", normed),
        (model.has_delta_nets, f"delta_net.num_value_heads={model.delta_net.num_value_heads}", recurrent),
        (model.has_mamba, f"mamba.num_heads={model.mamba.num_heads}", recurrent),
    ):
        if is_set:
            raise ConfigError(
                f"optimizer.qk_clip={settings.qk_clip} scales weights of queries and keys, and the model has "
                f"model.{name}, {reason}: use optimizer.qk_clip=null"
            )


def _check_group(name: str, group: ParameterGroup) -> None:
    """Raise ConfigError for a group that no parameter can have. What it matches is known once there are parameters."""
    if not group.match:
        raise ConfigError(f"{name}.match is empty: name a part of a parameter's path, such as moe.router")
    try:
        re.compile(group.match)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name}.match={group.match} must be a regular expression: {error}") from None
    check_number(f"{name}.learning_rate_factor", group.learning_rate_factor, RANGES["optimizer.learning_rate"])
    check_number(f"{name}.weight_decay", group.weight_decay, RANGES["optimizer.weight_decay"], " (or null)")
