"""All forward passes, then all backward passes (GPipe, Huang et al. 2019): every activation is kept."""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.table import Slot, Work

FACTS = PipelineFacts(listed=0, planned=(1,), tried=4)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Slot]:
    """The same for every stage."""
    works = [Work(m) for m in range(microbatches)]
    return [Slot(forward=work) for work in works] + [Slot(backward=work) for work in works]
