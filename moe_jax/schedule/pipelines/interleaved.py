"""1F1B over several model chunks per stage (Narayanan et al. 2021, §2.2): a bubble as many times smaller.

Microbatches go through a chunk in groups of as many as there are stages, then through the next chunk.
"""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.one_f_one_b import in_turn
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(listed=2, least_chunks=2, most_chunks=None, planned=(2,), tried=3)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """A gradient comes back after all chunks but the last, and two ticks for each stage behind (there and back)."""
    forward, backward = rounds(stages, microbatches, chunks)
    return in_turn(forward, backward, warm_up(stage, stages, chunks))


def rounds(stages: int, microbatches: int, chunks: int) -> tuple[list[ChunkPass], list[ChunkPass]]:
    """The order of forward and of backward passes, the same for every stage."""
    groups = [range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)]
    forward = [ChunkPass(m, c) for group in groups for c in range(chunks) for m in group]
    backward = [ChunkPass(m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    return forward, backward


def warm_up(stage: int, stages: int, chunks: int) -> int:
    """Forward passes before the first that is followed by a backward pass."""
    return (chunks - 1) * stages + 2 * (stages - stage - 1)
