"""1F1B whose steady ticks run a forward beside a backward pass, to hide each other's exchanges.

What DualPipe (DeepSeek-V3, 2024) does on its two directions, and Megatron's combined 1F1B: one forward pass more of
warm-up, so that the two passes of a tick do not wait for each other. Every tick but the first and last ones is alike on
all stages, so stages that wait for each other lose nothing. Without chunks a microbatch takes two ticks per stage to
come back, where 1F1B takes one pair: twice its activations.
"""

from itertools import zip_longest

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.interleaved import rounds, warm_up
from moe_jax.schedule.pipelines.table import StageTick

FACTS = PipelineFacts(listed=4, most_chunks=None, needs_stages=False, planned=(1, 2), tried=2)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """Forward passes alone, pairs, backward passes alone."""
    forward, backward = rounds(stages, microbatches, chunks)
    alone = min(warm_up(stage, stages, chunks) + 1, len(forward))
    pairs = zip_longest(forward[alone:], backward)
    return [StageTick(work) for work in forward[:alone]] + [StageTick(ahead, behind) for ahead, behind in pairs]
