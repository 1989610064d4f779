"""From a pipeline schedule's name to its table."""

from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.pipelines import ORDERS
from moe_jax.schedule.pipelines.assign_ticks import assign_ticks
from moe_jax.schedule.pipelines.table import Table


def make_table(name: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a schedule of `schedule.pipelines`; `chunks` model chunks on each stage. Raises ScheduleError."""
    _check_numbers(name, stages, microbatches, chunks)
    orders = [ORDERS[name](stage, stages, microbatches, chunks) for stage in range(stages)]
    return Table(
        name, stages, microbatches, chunks, PIPELINE_FACTS[name].split_weight_grad, assign_ticks(orders, chunks)
    )


def _check_numbers(name: str, stages: int, microbatches: int, chunks: int) -> None:
    if name not in PIPELINE_FACTS:
        raise ScheduleError(f"pipeline={name!r} is unknown: use {', '.join(PIPELINE_FACTS)}")
    for number, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ScheduleError(f"{number}={value} of a pipeline: use at least 1")
    pipeline = PIPELINE_FACTS[name]
    if chunks < pipeline.least_chunks:
        raise ScheduleError(
            f"chunks={chunks} is too few for pipeline={name}: use at least {pipeline.least_chunks}, or pipeline=1f1b"
        )
    if pipeline.most_chunks is not None and chunks > pipeline.most_chunks:
        several = [other for other, made in PIPELINE_FACTS.items() if made.most_chunks is None]
        raise ScheduleError(
            f"chunks={chunks} needs a schedule with several model chunks per stage: "
            f"use pipeline={' or '.join(several)}, or chunks={pipeline.most_chunks}"
        )
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        nearest = " or ".join(str(value) for value in (below, below + stages) if value)
        raise ScheduleError(
            f"microbatches={microbatches} cannot go around {stages} stages in groups of as many: use {nearest}, "
            "or chunks=1"
        )
