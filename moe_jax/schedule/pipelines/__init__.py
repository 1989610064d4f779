"""Pipeline schedules: the order in which a stage works through microbatches. One file each."""

from collections.abc import Callable

from moe_jax.config import registry
from moe_jax.schedule.pipelines.table import StageTick

# (stage, stages, microbatches, chunks) → the passes of a stage in order, without idle slots, which are added later
Order = Callable[[int, int, int, int], list[StageTick]]
ORDERS: dict[str, Order] = {name: module.order for name, module in registry.PIPELINE_FACTS.modules().items()}
