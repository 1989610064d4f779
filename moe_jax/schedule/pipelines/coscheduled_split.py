"""Co-scheduled 1F1B with weight gradients split from the backward pass, after the two passes of their tick.

Transfers of a pair of passes to other stages overlap with the weight gradients: as in DualPipe (DeepSeek-V3, 2024,
section 3.2.1), every exchange and every send of a steady tick overlaps with computation. Weight gradients then hide no
exchanges.
"""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines import coscheduled
from moe_jax.schedule.pipelines.table import StageTick

FACTS = PipelineFacts(listed=5, most_chunks=None, split_weight_grad=True)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """The co-scheduled order, with W in the tick of its B."""
    slots = coscheduled.order(stage, stages, microbatches, chunks)
    return [slot._replace(weight=slot.backward) for slot in slots]
