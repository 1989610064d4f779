"""Pipeline schedules: the order in which a stage works through microbatches. One file each."""

from collections.abc import Callable

from moe_jax.config import registry
from moe_jax.schedule.pipelines.table import StageTick

# of (stage, stages, microbatches, chunks): what a stage runs in turn; no idle slots, which are added afterwards
Order = Callable[[int, int, int, int], list[StageTick]]
ORDERS: dict[str, Order] = {name: module.order for name, module in registry.PIPELINE_FACTS.modules().items()}
