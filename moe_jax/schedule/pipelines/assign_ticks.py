"""From each stage's own order to ticks that all stages share."""

from collections.abc import Sequence

from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.pipelines.dependencies import inputs
from moe_jax.schedule.pipelines.table import StageTick, TableTask


def assign_ticks(orders: Sequence[Sequence[StageTick]], chunks: int) -> tuple[tuple[StageTick, ...], ...]:
    """Ticks [tick][stage] in which every stage runs its slots in order, each as early as its inputs allow.

    What a stage sends in a tick is there in the next one. Raises ScheduleError if stages wait for each other.
    """
    stages = len(orders)
    done: set[TableTask] = set()
    places = [0] * stages
    ticks = []

    def tasks(stage: int) -> list[TableTask]:
        return [TableTask(direction, stage, work) for direction, work in orders[stage][places[stage]].tasks()]

    def is_ready(stage: int) -> bool:
        slot = tasks(stage)
        own = {task for task in slot if task.direction == "B"}  # whose W may be in the same slot
        return all((done | own).issuperset(inputs(task, stages, chunks)) for task in slot)

    while left := [stage for stage in range(stages) if places[stage] < len(orders[stage])]:
        ready = set(filter(is_ready, left))
        if not ready:
            stuck = tasks(left[0])[0]
            raise ScheduleError(f"{stuck} waits for what never runs: check the order of each stage")
        ticks.append(tuple(orders[stage][places[stage]] if stage in ready else StageTick() for stage in range(stages)))
        done |= {task for stage in ready for task in tasks(stage)}
        places = [place + (stage in ready) for stage, place in enumerate(places)]
    return tuple(ticks)
