"""GPipe (Huang et al. 2019): all forward passes, then all backward passes. All activations are stored."""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(listed=0, planned=(1,), tried=4)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """The same order for every stage."""
    works = [ChunkPass(m) for m in range(microbatches)]
    return [StageTick(forward=work) for work in works] + [StageTick(backward=work) for work in works]
