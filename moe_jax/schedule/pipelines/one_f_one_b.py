"""One forward, one backward pass in turn (PipeDream-Flush, Narayanan et al. 2021): GPipe's time, less memory."""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(name="1f1b", listed=1, planned=(1,), tried=0)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """A stage warms up with as many forward passes as there are stages behind it."""
    works = [ChunkPass(m) for m in range(microbatches)]
    return in_turn(works, works, warm_up=stages - stage - 1)


def in_turn(forward: list[ChunkPass], backward: list[ChunkPass], warm_up: int) -> list[StageTick]:
    """`warm_up` forward passes, then one forward and one backward in turn, then what is left of the backward."""
    slots = [StageTick(forward=work) for work in forward[:warm_up]]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        slots += [StageTick(forward=ahead), StageTick(backward=behind)]
    return slots + [StageTick(backward=work) for work in backward[max(len(forward) - warm_up, 0) :]]
