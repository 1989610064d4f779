"""ZB-H1 (Qi et al. 2023, §2.1): 1F1B with split weight gradients, which fill the idle ends of the later stages.

The previous stage needs only activation gradients, so B comes back sooner. Stage s runs W s microbatches after their B:
then all stages have as many microbatches between F and W, and no more than 1F1B's first stage.
"""

from moe_jax.config.facts import PipelineFacts
from moe_jax.schedule.pipelines import one_f_one_b
from moe_jax.schedule.pipelines.table import ChunkPass, StageTick

FACTS = PipelineFacts(listed=3, split_weight_grad=True, planned=(1,), tried=1)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[StageTick]:
    """1F1B's order, with W lagging `stage` microbatches after B, and the remaining W at the end."""
    slots: list[StageTick] = []
    for slot in one_f_one_b.order(stage, stages, microbatches, chunks):
        slots.append(slot)
        if slot.backward and slot.backward.microbatch >= stage:
            slots.append(StageTick(weight=ChunkPass(slot.backward.microbatch - stage)))
    return slots + [StageTick(weight=ChunkPass(m)) for m in range(max(microbatches - stage, 0), microbatches)]
