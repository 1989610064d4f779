"""Parameters of a device of a pipeline stage, and the reductions of their gradients."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config, Sections
from moe_jax.config.layer_layout import Stages, segments
from moe_jax.plan.collective_costs import DeviceGroup
from moe_jax.plan.gradients import ITEM_BYTES, Sum, params_by_group, parts_of, shard_groups
from moe_jax.plan.resources import Owned, owned_by_block, owned_parameters, with_mtp_input


class StageParameters(NamedTuple):
    """Parameters of a stage, equal for all stages: embedding and head, and the rows of blocks of the longest one."""

    ends: Owned  # embedding, last norm and head
    blocks: Owned

    def on_device(self, config: Sections, mesh: Mapping[str, int]) -> int:
        """Parameters of one device."""
        return sum(sum(params_by_group(owned, config, mesh).values()) for owned in self)


def stage_parameters_of(config: Sections) -> StageParameters:
    """Parameters of each stage of a config. Raises ConfigError if it has too few blocks."""
    return _stage_parameters(Stages.of(config))


def stage_sums(config: Config, mesh: Mapping[str, int]) -> list[Sum]:
    """Reductions of gradients, not split into buckets.

    A stage's own gradients are summed over its devices, those of the embedding and head over all stages, too. If they
    are scattered (ZeRO), they are summed over stages shard by shard.
    """
    params, parts, hybrid = stage_parameters_of(config), parts_of(config, mesh), shard_groups(config, mesh)

    def of_devices(owned: Owned) -> list[Sum]:
        return [
            Sum(group, count * ITEM_BYTES, parts[group], hybrid.get(group))
            for group, count in params_by_group(owned, config, mesh).items()
        ]

    blocks = of_devices(params.blocks)
    if config.optimizer.zero == 0:
        return [*blocks, Sum(DeviceGroup(math.prod(mesh.values()), 1), params.ends.whole * ITEM_BYTES)]
    ends, stages = (
        of_devices(params.ends),
        DeviceGroup(mesh["pipeline"], mesh["context"] * mesh["expert"] * mesh["tensor"]),
    )
    return [*blocks, *ends, *(Sum(stages, each.num_bytes / each.parts) for each in ends)]


@functools.lru_cache(maxsize=64)
def _stage_parameters(stages: Stages) -> StageParameters:
    model = stages.model
    embedding, *_, head = owned_parameters(model)
    blocks = [
        (owned_by_block(model, kind, view), total // stages.stages)
        for segment, (total, *_) in zip(segments(model), stages.layout, strict=True)
        for kind, view in zip(segment.kinds, segment.views, strict=True)
    ]
    if model.has_mtp:  # the highest segment
        highest, rows = blocks[-1]
        blocks[-1] = with_mtp_input(highest, model), rows
    totals = ([count * number for number in owned] for owned, count in blocks)
    return StageParameters(
        ends=Owned(embedding.whole + head.whole, end_matrices=embedding.end_matrices + head.end_matrices),
        blocks=Owned(*map(sum, zip(*totals, strict=True))),
    )
