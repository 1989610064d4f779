"""All forward passes, then all backward passes (GPipe, Huang et al. 2019): every activation is kept."""

from moe_jax.schedule.pipelines.protocol import Pipeline
from moe_jax.schedule.pipelines.table import Slot, Work


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Slot]:
    """The same for every stage."""
    works = [Work(m) for m in range(microbatches)]
    return [Slot(forward=work) for work in works] + [Slot(backward=work) for work in works]


PIPELINE = Pipeline(order)
