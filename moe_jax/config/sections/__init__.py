"""All settings of an experiment, as frozen sections of plain values. Related sections share a file.

The comment on a field gives its meaning and its unit; fractions are between 0 and 1. `config/validate/` checks the
values, and `config/yaml_io.py` reads them from YAML and the command line.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_jax.config.sections.data import MOST_MARKED_SOURCES, TEXT_SUFFIXES, TOKEN_AXES, DataConfig, DataSource
from moe_jax.config.sections.hashing import HashedOnce
from moe_jax.config.sections.model import (
    AttentionConfig,
    AttentionView,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    RopeScalingConfig,
)
from moe_jax.config.sections.parallel import ExchangeConfig, MeshConfig, ScheduleConfig
from moe_jax.config.sections.recurrent import DeltaNetConfig, MambaConfig
from moe_jax.config.sections.run import CheckpointConfig, LogConfig, MigrationConfig, PlanConfig, TuneConfig
from moe_jax.config.sections.training import OptimizerConfig, ParameterGroup, TrainConfig
from moe_jax.config.step_kinds import STEP_FACTS, StepFacts, StepKindName

__all__ = [
    "MOST_MARKED_SOURCES",
    "TEXT_SUFFIXES",
    "TOKEN_AXES",
    "AttentionConfig",
    "AttentionView",
    "CheckpointConfig",
    "DataConfig",
    "DataSource",
    "DeltaNetConfig",
    "ExchangeConfig",
    "HashedOnce",
    "LatentConfig",
    "LogConfig",
    "MambaConfig",
    "MeshConfig",
    "MigrationConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PlanConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "Sections",
    "TrainConfig",
    "TuneConfig",
]


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All settings of one experiment, unchecked."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def may_wait_in_threads(self) -> bool:
        """Whether a step may wait in the host's threads for data that other devices send."""
        exchange = self.exchange
        return exchange.in_background or exchange.is_elsewhere or "algorithm" in self.tune.over

    @property
    def replicas(self) -> int:
        """The number of each expert rank's positions for copies of other ranks' experts."""
        return self.migration.replicas if self.migration.enabled else 0

    @property
    def rank_speeds(self) -> tuple[float, ...] | None:
        """The speeds of the expert ranks, relative to their mean; None if experts do not migrate or all are equal."""
        speeds = self.migration.rank_speeds if self.migration.enabled else None
        if speeds is None or len(set(speeds)) == 1:
            return None
        return tuple(speed * len(speeds) / sum(speeds) for speed in speeds)

    def expert_slots(self, sizes: Mapping[str, int]) -> int:
        """Return the positions of all ranks for the experts of one block and their copies, on a mesh of these sizes."""
        return self.model.moe.num_experts + self.replicas * self.mesh.expert_ranks(sizes)

    @functools.cached_property
    def step_kind(self) -> StepKindName:
        """The kind of training step that these settings require."""
        if self.mesh.pipeline > 1 or not self.schedule.pipeline_facts.needs_stages:
            return "pipelined"
        names = ("policy", "weight_grad", "grad_reduce", "param_gather")
        is_unscheduled = all(getattr(self.schedule, name) == getattr(ScheduleConfig, name) for name in names)
        return "plain" if is_unscheduled and self.exchange.reduction == "all_reduce" else "scheduled"

    @property
    def param_gather(self) -> Literal["none", "block", "prefetch"]:
        """When a step gathers the parameters of each block. A plain step does so right before the block; with pipeline
        stages all are gathered at once, before the step.
        """
        if self.optimizer.zero < 3 or self.step_kind == "pipelined":
            return "none"
        return "block" if self.step_kind == "plain" else self.schedule.param_gather

    @functools.cached_property
    def step_facts(self) -> StepFacts:
        """The properties of every step of this kind."""
        return STEP_FACTS[self.step_kind]
