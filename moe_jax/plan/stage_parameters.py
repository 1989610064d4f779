"""Parameters that a device of a pipeline stage has."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages, segments
from moe_jax.plan.collective_costs import DeviceGroup
from moe_jax.plan.gradients import ITEM_BYTES, Sum, held_by, parts_of
from moe_jax.plan.resources import Owned, owned_by_kind, owned_parameters


class OnStage(NamedTuple):
    """Every stage has the same: the ends of the model, and as many rows of blocks as the longest one needs."""

    ends: Owned  # embedding, last norm and head
    blocks: Owned

    def on_device(self, config: Config, mesh: Mapping[str, int]) -> int:
        """Of one device."""
        return sum(sum(held_by(owned, config, mesh).values()) for owned in self)


def on_stage(config: Config) -> OnStage:
    """Of a config. Raises ConfigError if it has too few blocks."""
    return _on_stage(Stages.of(config))


def sums_on_stage(config: Config, mesh: Mapping[str, int]) -> list[Sum]:
    """Of gradients, without chunks: a stage's own over its devices, those of the model's ends over all stages, too.

    Scattered ends are summed over stages part by part.
    """
    held, parts = on_stage(config), parts_of(config, mesh)

    def of_devices(owned: Owned) -> list[Sum]:
        return [Sum(group, count * ITEM_BYTES, parts[group]) for group, count in held_by(owned, config, mesh).items()]

    blocks = of_devices(held.blocks)
    if config.optimizer.zero == 0:
        return [*blocks, Sum(DeviceGroup(math.prod(mesh.values()), 1), held.ends.whole * ITEM_BYTES)]
    ends, stages = (
        of_devices(held.ends),
        DeviceGroup(mesh["pipeline"], mesh["context"] * mesh["expert"] * mesh["tensor"]),
    )
    return [*blocks, *ends, *(Sum(stages, each.held_bytes / each.parts) for each in ends)]


@functools.lru_cache(maxsize=64)
def _on_stage(stages: Stages) -> OnStage:
    model = stages.model
    (embedding, *_, head), of_kind = owned_parameters(model), owned_by_kind(model)
    held = [
        (kind, rows * stages.chunks)
        for segment, rows in zip(segments(model), stages.rows, strict=True)
        for kind in segment.kinds
    ]
    totals = ([count * number for number in of_kind[kind]] for kind, count in held)
    return OnStage(
        ends=Owned(embedding.whole + head.whole),
        blocks=Owned(*map(sum, zip(*totals, strict=True))),
    )
