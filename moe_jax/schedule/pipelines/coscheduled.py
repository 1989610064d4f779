"""1F1B with a forward and a backward pass in each steady tick, so that they hide each other's exchanges.

DualPipe (DeepSeek-V3, 2024) does this on its two directions, and so does Megatron's combined 1F1B: the warm-up has one
more forward pass, so that the two passes of a tick do not wait for each other. All stages run the same kind of tick
except at the start and the end, so waiting for each other after every tick costs nothing. Without model chunks a
microbatch takes two ticks per stage to come back, where 1F1B takes one pair of passes: twice the activations of 1F1B.
"""

from itertools import zip_longest

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines.interleaved import rounds, warm_up
from moe_jax.schedule.pipelines.table import StageTick

FACTS = PipelineFacts(listed=4, most_chunks=None, needs_stages=False, planned=(1, 2), tried=2)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """Forward passes alone, then pairs, then backward passes alone."""
    forward, backward = rounds(stages, microbatches, chunks)
    alone = min(warm_up(stage, stages, chunks) + 1, len(forward))
    pairs = zip_longest(forward[alone:], backward)
    return [StageTick(work) for work in forward[:alone]] + [StageTick(*pair) for pair in pairs]
