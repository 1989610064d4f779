"""Build the table of a pipeline schedule from its name."""

from collections.abc import Sequence

from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.pipelines import ORDERS
from moe_jax.schedule.pipelines.dependencies import inputs
from moe_jax.schedule.pipelines.table import StageTick, Table, TableTask


def make_table(name: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a schedule of `schedule.pipelines`, with `chunks` model chunks per stage. Raises ScheduleError."""
    _check_numbers(name, stages, microbatches, chunks)
    orders = [ORDERS[name](stage, stages, microbatches, chunks) for stage in range(stages)]
    return Table(
        name, stages, microbatches, chunks, PIPELINE_FACTS[name].split_weight_grad, _assign_ticks(orders, chunks)
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


def _assign_ticks(orders: Sequence[Sequence[StageTick]], chunks: int) -> tuple[tuple[StageTick, ...], ...]:
    """Ticks [tick][stage] in which every stage runs its passes in order, each as early as its inputs allow.

    A stage's outputs reach the next stage one tick later. Raises ScheduleError if stages wait for each other.
    """
    stages = len(orders)
    tasks = [[_tasks(slot, stage) for slot in order] for stage, order in enumerate(orders)]
    needs = [[_needs(slot, stages, chunks) for slot in slots] for slots in tasks]
    done: set[TableTask] = set()
    places = [0] * stages
    ticks = []
    while left := [stage for stage in range(stages) if places[stage] < len(orders[stage])]:
        ready = {stage for stage in left if needs[stage][places[stage]] <= done}
        if not ready:
            stuck = tasks[left[0]][places[left[0]]][0]
            raise ScheduleError(f"{stuck} waits for what never runs: check the order of each stage")
        ticks.append(tuple(orders[stage][places[stage]] if stage in ready else StageTick() for stage in range(stages)))
        done.update(*(tasks[stage][places[stage]] for stage in ready))
        places = [place + (stage in ready) for stage, place in enumerate(places)]
    return tuple(ticks)


def _tasks(slot: StageTick, stage: int) -> list[TableTask]:
    return [TableTask(direction, stage, work) for direction, work in slot.tasks()]


def _needs(slot: Sequence[TableTask], stages: int, chunks: int) -> set[TableTask]:
    """The tasks that must end before a slot can start."""
    own = {task for task in slot if task.direction == "B"}  # its W may be in the same slot
    return {need for task in slot for need in inputs(task, stages, chunks)} - own
