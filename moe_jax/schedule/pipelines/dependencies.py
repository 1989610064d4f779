"""Dependencies between the entries of a table, and a check that a table respects them."""

from collections.abc import Mapping

from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.pipelines.table import DIRECTIONS, ChunkPass, Table, TableTask


def activation_from(task: TableTask, stages: int) -> TableTask | None:
    """The forward task of the previous stage that sends a forward task its activations; None for tokens as input."""
    _, stage, (microbatch, chunk) = task
    if stage > 0:
        return TableTask("F", stage - 1, task.work)
    return TableTask("F", stages - 1, ChunkPass(microbatch, chunk - 1)) if chunk > 0 else None


def gradient_from(task: TableTask, stages: int, chunks: int) -> TableTask | None:
    """The backward task of the next stage that sends a backward task its gradient; None if it starts at the loss."""
    _, stage, (microbatch, chunk) = task
    if stage < stages - 1:
        return TableTask("B", stage + 1, task.work)
    return TableTask("B", 0, ChunkPass(microbatch, chunk + 1)) if chunk < chunks - 1 else None


def inputs(task: TableTask, stages: int, chunks: int) -> tuple[TableTask, ...]:
    """The tasks that must end in an earlier tick; a W may also follow its B in the same tick.

    F needs the activations. B needs the values that its own F saved, and the gradient. W needs its B, which received
    the gradient.
    """
    match task.direction:
        case "F":
            received = activation_from(task, stages)
            return (received,) if received else ()
        case "B":
            received = gradient_from(task, stages, chunks)
            own = TableTask("F", task.stage, task.work)
            return (own, received) if received else (own,)
        case _:
            return (TableTask("B", task.stage, task.work),)


def check(table: Table) -> None:
    """Raise ScheduleError if a task is missing, listed twice, unknown, or not in a tick after all its inputs."""
    ran: dict[TableTask, int] = {}
    directions = DIRECTIONS if table.split_weight_grad else ("F", "B")
    tasks = [TableTask(d, stage, work) for d in directions for stage in range(table.stages) for work in table.works()]
    known = set(tasks)
    for tick, slots in enumerate(table.ticks):
        if len(slots) != table.stages:
            raise ScheduleError(f"tick {tick} has {len(slots)} slots: write one for each of {table.stages} stages")
    for tick, task in table.tasks():
        if task not in known:
            raise ScheduleError(
                f"{task} in tick {tick} is no task of a table with {table.microbatches} microbatches, "
                f"{table.chunks} chunks and split_weight_grad={table.split_weight_grad}: take it out"
            )
        if task in ran:
            raise ScheduleError(f"{task} runs in tick {ran[task]} and in tick {tick}: take one out")
        ran[task] = tick
    for task in tasks:
        if task not in ran:
            raise ScheduleError(f"{task} is missing: add it")
        _check_inputs(task, ran, table)


def _check_inputs(task: TableTask, ran: Mapping[TableTask, int], table: Table) -> None:
    last = ran[task] - (task.direction != "W")
    for need in inputs(task, table.stages, table.chunks):
        if need not in ran or ran[need] > last:
            where = f"runs in tick {ran[need]}" if need in ran else "is missing"
            raise ScheduleError(
                f"{task} runs in tick {ran[task]} and needs {need}, which {where}: move it to an earlier tick"
            )
