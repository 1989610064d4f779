"""Checks that a run can resume from its checkpoints: they need the same model and the same order of the data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.config import Config, DataConfig
from moe_jax.config.gates import gate_parameters
from moe_jax.config.layer_layout import Stages
from moe_jax.config.renamed import with_new_names
from moe_jax.config.yaml_io import config_from, load_config
from moe_jax.errors import CheckpointError, ConfigError

# Settings that cannot change when a run resumes: they define the meaning of its parameters, and the next tokens.
_MODEL = ("model.",)
# That the tokens are the same is checked by their checksums (run/identity.py), not by their path.
_OPTIMIZER = ("optimizer.name", "optimizer.moments_dtype", "optimizer.ema_decay")
_FIXED = (*_MODEL, *_OPTIMIZER, "data.seq_len", "train.seed", "train.batch_size")
_FREE = {
    "model.moe.capacity_factor",
    "model.moe.capacity_schedule",
    "model.moe.hooks",
    "model.moe.expert_matmuls",
    "model.moe.dispatcher",
    "model.moe.aux_loss_coeff",
    "model.moe.load_balancing_type",
    "model.moe.z_loss_coeff",
    "model.moe.bias_update_rate",  # if both configs have a router bias, or neither has
}
_EFFECTS = {"train.steps": "; the learning rate follows the new number"}  # of a change
_NOT_OF_A_STEP = ("log.", "checkpoint.", "plan.", "train.eval_every")


def check_same_run(
    config: Config, run: Path, ignore_data_order: bool = False, step: int | None = None, ignore_stages: bool = False
) -> None:
    """Raise CheckpointError unless the run's saved config has the same model and order of the data as this config.

    `ignore_data_order` is for readers of parameters, which need only the same model, and `ignore_stages` for those that
    can reorder blocks. With `step`, from which the run resumes, the weights of sources may differ in later steps.
    """
    try:
        saved = load_config(run)
    except ConfigError as error:
        raise CheckpointError(
            f"log.dir={run} has checkpoints, but not the config of their model ({error}): use another log.dir"
        ) from None
    _check_same(config, saved, run, _MODEL if ignore_data_order else _FIXED)
    if not ignore_stages:
        _check_stages(config, saved, run)
    if not ignore_data_order:
        _check_mixture(config.data, saved.data, run, step)


def check_same_model(config: Config, saved: Mapping[str, Any], run: Path, step: int) -> None:
    """Raise CheckpointError unless a checkpoint's own config has the same model and order of the data as this config.

    `saved` is the config in the checkpoint's record.
    """
    try:
        made_with = config_from(with_new_names(saved))
    except ConfigError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} in log.dir={run} was made with settings of another version ({error}): "
            "use that version, or another log.dir"
        ) from None
    _check_same(config, made_with, run, _FIXED)
    _check_stages(config, made_with, run)
    _check_mixture(config.data, made_with.data, run, step)


def _check_same(config: Config, saved: Config, run: Path, fixed: tuple[str, ...]) -> None:
    free = _FREE
    if gate_parameters(config.model) != gate_parameters(saved.model):
        free = free - {"model.moe.bias_update_rate"}
    if (config.optimizer.ema_decay is None) == (saved.optimizer.ema_decay is None):
        free = free | {"optimizer.ema_decay"}
    for name, here, there in _differences(config, saved, ""):
        if name.startswith(fixed) and name not in free:
            # parameters are kept, moments start at zero
            reset = f" with train.init_from={run}, which resets the moments" if name.startswith("optimizer.") else ""
            raise CheckpointError(
                f"{name}={_value(here)}, but the checkpoints in log.dir={run} have {name}={_value(there)}: "
                f"use {name}={_value(there)}, or another log.dir{reset}"
            )


def _check_stages(config: Config, saved: Config, run: Path) -> None:
    """Raise CheckpointError unless both configs have the same rows of blocks in pipeline stages."""
    if Stages.of(config).layout != Stages.of(saved).layout:
        here, there = (_stages_text(each) for each in (config, saved))
        raise CheckpointError(
            f"{here}, but the checkpoints in log.dir={run} hold blocks in the order of {there}: "
            f"use {there}, or another log.dir"
        )


def _check_mixture(data: DataConfig, saved: DataConfig, run: Path, step: int | None) -> None:
    """Raise CheckpointError unless both configs have the same weights of sources in all steps up to `step`, or in all
    steps. What the sources contain is compared by checksums (run/identity.py).
    """
    here, there = len(data.mixture), len(saved.mixture)
    if here != there:
        raise CheckpointError(
            f"data.sources has {_number(data)}, but the checkpoints in log.dir={run} were trained on {_number(saved)}: "
            "use the same ones, or another log.dir"
        )
    if here == 1:  # its weight has no effect
        return
    for first in sorted({*data.weight_steps, *saved.weight_steps}):
        own, trained = ([source.weight_at(first) for source in each.mixture] for each in (data, saved))
        if own != trained and (step is None or first <= step):
            later = "" if step is None else f" (a weight_schedule may change them from step {step + 1} on)"
            cure = f"use these weights{later}"
            if sorted(own) == sorted(trained):
                cure = f"list the sources in the same order, or {cure}"
            raise CheckpointError(
                f"data.sources has weights {own} in step {first}, but the checkpoints in log.dir={run} were trained "
                f"with {trained}: {cure}, or another log.dir"
            )


def renamed_sources(config: Config, saved: Mapping[str, Any]) -> str:
    """Return a warning about sources that have another name in metrics than in a checkpoint; empty without any.

    `saved` is the config in the checkpoint's record, as checked by `check_same_model`. Names determine nothing else.
    """
    trained = config_from(with_new_names(saved)).data.sources
    named = [(own.label, old.label) for own, old in zip(config.data.sources, trained, strict=False)]
    changed = [f"data.sources[{k}] is {own}, and was {old}" for k, (own, old) in enumerate(named) if own != old]
    if not changed:
        return ""
    return f"{'; '.join(changed)}: metrics of later steps have the new name (set its name to keep the old one)"


def changed_settings(config: Config, saved: Mapping[str, Any]) -> str:
    """Return the settings that differ from those of a checkpoint, with its values; empty without any.

    `saved` is the config in the checkpoint's record. Settings of logs, checkpoints and plans do not change what a step
    computes, and are left out, and so is the number of steps if the learning rate does not depend on it.
    """
    trained = config_from(with_new_names(saved))
    left_out: tuple[str, ...] = _NOT_OF_A_STEP
    if config.optimizer.schedule == trained.optimizer.schedule == "constant":
        left_out += ("train.steps",)
    changed = [each for each in _differences(config, trained, "") if not each[0].startswith(left_out)]
    texts = [f"{name}={_value(here)} (was {_value(there)}{_EFFECTS.get(name, '')})" for name, here, there in changed]
    return ", ".join(texts)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number(data: DataConfig) -> str:
    """The number of sources in words."""
    return f"{len(data.sources)} sources" if len(data.sources) > 1 else "one source"


def _stages_text(config: Config) -> str:
    settings = config.schedule
    head = f" and schedule.head_blocks={settings.head_blocks}" if settings.head_blocks else ""
    return f"mesh.pipeline={config.mesh.pipeline} with schedule.virtual_stages={settings.virtual_stages}{head}"


def _differences(here: Any, there: Any, name: str) -> list[tuple[str, Any, Any]]:
    if not hasattr(here, "__dataclass_fields__"):
        return [(name, here, there)] if here != there else []
    return [
        difference
        for field in here.__dataclass_fields__
        for difference in _differences(getattr(here, field), getattr(there, field), f"{name}.{field}".lstrip("."))
    ]
