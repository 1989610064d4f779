"""Pipeline schedules: the order in which a stage works through microbatches. One file each."""

from moe_jax.schedule.pipelines import coscheduled, coscheduled_split, gpipe, interleaved, one_f_one_b, zero_bubble
from moe_jax.schedule.pipelines.protocol import Pipeline

PIPELINES: dict[str, Pipeline] = {
    "gpipe": gpipe.PIPELINE,
    "1f1b": one_f_one_b.PIPELINE,
    "interleaved": interleaved.PIPELINE,
    "zero_bubble": zero_bubble.PIPELINE,
    "coscheduled": coscheduled.PIPELINE,
    "coscheduled_split": coscheduled_split.PIPELINE,
}
