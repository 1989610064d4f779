"""What a pipeline schedule provides."""

from collections.abc import Callable
from typing import NamedTuple

from moe_jax.schedule.pipelines.table import Slot


class Pipeline(NamedTuple):
    """The order in which each stage works; ticks are added afterwards."""

    order: Callable[[int, int, int, int], list[Slot]]  # of (stage, stages, microbatches, chunks); no idle slots
    least_chunks: int = 1
    most_chunks: int | None = 1  # None: any number
    split_weight_grad: bool = False
