"""Rules for multi-token prediction."""

from moe_jax.config.sections import Sections, TrainConfig
from moe_jax.config.validate.ranges import RANGES, check_changes
from moe_jax.errors import ConfigError

_NUMBER, _SCALE = "model.num_nextn_predict_layers", "train.mtp_loss_scaling_factor"
_CHANGES = "train.mtp_loss_schedule"


def check_mtp(config: Sections) -> None:
    """Raise ConfigError for settings of multi-token prediction without it, and for steps that do not support it."""
    train, changes = config.train, [list(pair) for pair in config.train.mtp_loss_schedule]
    check_changes(_CHANGES, train.mtp_loss_schedule, RANGES[_SCALE], "a weight", [[10000, 0.1]])
    if not config.model.has_mtp:
        for name, value, unset in (
            (_SCALE, train.mtp_loss_scaling_factor, TrainConfig.mtp_loss_scaling_factor),
            (_CHANGES, changes, []),
        ):
            if value != unset:
                raise ConfigError(
                    f"{name}={value} is for multi-token prediction, and {_NUMBER}=0: set {_NUMBER}=1, or {name}={unset}"
                )
        return
    for name in ("record_routing", "replay_routing"):
        if (folder := getattr(train, name)) is not None:
            raise ConfigError(
                f"train.{name}={folder} has the experts of the decoder's blocks, and {_NUMBER}=1: use {_NUMBER}=0, or "
                f"train.{name}=null"
            )
    if config.step_facts.has_ticks:
        stages, order = config.mesh.pipeline, config.schedule.pipeline
        ticks, cure = ("mesh.pipeline", 1) if stages > 1 else ("schedule.pipeline", "1f1b")
        raise ConfigError(
            f"{_NUMBER}=1 is not for the ticks of a pipeline, and {ticks}={stages if stages > 1 else order}: "
            f"use {ticks}={cure}, or {_NUMBER}=0"
        )
