"""1F1B (PipeDream-Flush, Narayanan et al. 2021): one forward, one backward pass. GPipe's time with less memory."""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(name="1f1b", listed=1, planned=(1,), tried=0)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """Warm up with as many forward passes as there are later stages, then alternate."""
    works = [ChunkPass(m) for m in range(microbatches)]
    return alternate(works, works, warm_up=stages - stage - 1)


def alternate(forward: list[ChunkPass], backward: list[ChunkPass], warm_up: int) -> list[StageTick]:
    """Run `warm_up` forward passes, then forward and backward passes alternately, then the other backward passes."""
    slots = [StageTick(forward=work) for work in forward[:warm_up]]
    for ahead, back in zip(forward[warm_up:], backward, strict=False):
        slots += [StageTick(forward=ahead), StageTick(backward=back)]
    return slots + [StageTick(backward=work) for work in backward[max(len(forward) - warm_up, 0) :]]
