"""1F1B over several model chunks per stage (Narayanan et al. 2021, §2.2). The bubble is smaller by their number.

Microbatches go through a chunk in groups of as many as there are stages, then through the next chunk.
"""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.one_f_one_b import alternate
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(listed=2, least_chunks=2, most_chunks=None, planned=(2,), tried=3)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """1F1B with a longer warm-up.

    A gradient comes back after all chunks but the last, and two more ticks for each later stage (there and back).
    """
    forward, backward = rounds(stages, microbatches, chunks)
    return alternate(forward, backward, warm_up(stage, stages, chunks))


def rounds(stages: int, microbatches: int, chunks: int) -> tuple[list[ChunkPass], list[ChunkPass]]:
    """The order of forward and of backward passes, the same for every stage."""
    groups = [range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)]
    forward = [ChunkPass(m, c) for group in groups for c in range(chunks) for m in group]
    backward = [ChunkPass(m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    return forward, backward


def warm_up(stage: int, stages: int, chunks: int) -> int:
    """The number of forward passes before the first one that is followed by a backward pass."""
    return (chunks - 1) * stages + 2 * (stages - stage - 1)
