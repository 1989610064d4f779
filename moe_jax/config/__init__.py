"""Settings of an experiment: frozen, validated values, read from YAML and the command line. Imports no jax."""

from dataclasses import dataclass

from moe_jax.config.sections import (
    AttentionConfig,
    AttentionView,
    CheckpointConfig,
    DataConfig,
    DeltaNetConfig,
    ExchangeConfig,
    HashedOnce,
    LatentConfig,
    LogConfig,
    MambaConfig,
    MeshConfig,
    MigrationConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PlanConfig,
    RopeScalingConfig,
    ScheduleConfig,
    Sections,
    TrainConfig,
    TuneConfig,
)
from moe_jax.config.validate import check_config

__all__ = [
    "AttentionConfig",
    "AttentionView",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeltaNetConfig",
    "ExchangeConfig",
    "LatentConfig",
    "LogConfig",
    "MambaConfig",
    "MeshConfig",
    "MigrationConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlanConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "Sections",
    "TrainConfig",
    "TuneConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config(HashedOnce, Sections):
    """The validated settings of one experiment.

    Creating a Config validates it: an invalid setting raises ConfigError with its name, its value and the cure.
    """

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        check_config(self)
