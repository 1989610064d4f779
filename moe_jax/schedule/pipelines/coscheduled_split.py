"""Co-scheduled 1F1B with weight gradients apart, behind the passes of their own tick.

What a pair of passes sends to other stages travels beside them: as in DualPipe (DeepSeek-V3, 2024, section 3.2.1), no
exchange and no send of a steady tick has nothing to hide behind. Weight gradients then hide no exchanges.
"""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines import coscheduled
from moe_jax.schedule.pipelines.table import StageTick

FACTS = PipelineFacts(listed=5, most_chunks=None, split_weight_grad=True)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """The co-scheduled order, W in the tick of its B."""
    slots = coscheduled.order(stage, stages, microbatches, chunks)
    return [slot._replace(weight=slot.backward) for slot in slots]
