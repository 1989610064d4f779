"""The memory of many configs of one plan, each computed once, and whether it fits a device."""

import operator
from dataclasses import dataclass, field, fields, replace

from moe_jax.config import Config, Sections
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.memory import step_memory
from moe_jax.plan.memory_parts import StepMemory, moments_of
from moe_jax.plan.stage_parameters import stage_parameters_of

LEFT_FREE = 0.06  # share of a device's memory for the runtime and errors of the estimate


@dataclass(frozen=True)
class ConfigMemory:
    """Memory on a cluster's devices. `factor`: the ratio of real to estimated memory."""

    cluster: Cluster
    factor: float
    _known: dict[Config, StepMemory] = field(default_factory=dict, init=False, compare=False)
    _by_key: dict[tuple[object, ...], StepMemory] = field(default_factory=dict, init=False, compare=False)

    def of(self, config: Config) -> StepMemory:
        """Return the memory of a config's step."""
        if config not in self._known:
            self._known[config] = self._memory_of(config)
        return self._known[config]

    def _memory_of(self, config: Config) -> StepMemory:
        mesh, platform, has_ticks = config.mesh.sizes, self.cluster.device.platform, config.step_facts.has_ticks
        optimizer = config.optimizer
        has_own_update = optimizer.facts.orthogonalizes or optimizer.offload_moments  # whose workspace ZeRO shards, too
        key = *memory_key(config), optimizer if has_own_update or not has_ticks else optimizer.zero == 3
        if key not in self._by_key:
            self._by_key[key] = step_memory(config, platform, mesh, self.cluster.device.capability)
        if not has_ticks:
            return self._by_key[key]
        # the only other memory of a step with ticks that ZeRO 1 shards
        moments = moments_of(stage_parameters_of(config), config, mesh, platform)
        return replace(self._by_key[key], optimizer=moments["optimizer"], on_host=moments["on_host"])

    def fits(self, config: Config) -> bool:
        """Whether a config's step fits."""
        return self.has_room(self.of(config).total)

    def has_room(self, num_bytes: float) -> bool:
        """Whether a device has room for so much estimated memory."""
        limit = self.cluster.device.memory_bytes
        return limit is None or self.factor * num_bytes <= limit * (1 - LEFT_FREE)


_other_sections = operator.attrgetter(
    *(field.name for field in fields(Sections) if field.name not in ("optimizer", "schedule"))
)


def memory_key(config: Sections) -> tuple[object, ...]:
    """What the memory of a step depends on, apart from the optimizer: schedules often need the same."""
    schedule = config.schedule
    parts = schedule.microbatches if schedule.cuts_batch else 1
    sends_ragged = schedule.policy_facts.sends_ragged and schedule.expert_chunks == 1
    return (
        *_other_sections(config),
        *(schedule.pipeline, schedule.virtual_stages, schedule.head_blocks, schedule.remat, schedule.unroll),
        schedule.offload_activations,
        *(sends_ragged and parts > 1, parts, schedule.grad_reduce, config.step_kind, config.param_gather),
    )
