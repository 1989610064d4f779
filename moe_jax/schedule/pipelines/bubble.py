"""The duration of a pipeline table, and the share of it in which stages are idle.

Times are seconds of one pass: forward, activation gradients, weight gradients (part of B if they are not split). A slot
with F and B takes the sum of both, or `together_s` if they hide each other's exchanges. A stage's output reaches
another stage after `send_s`.
"""

from moe_jax.schedule.pipelines.dependencies import inputs
from moe_jax.schedule.pipelines.table import StageTick, Table, TableTask

SlotSeconds = list[list[float]]  # [tick][stage]


def bubble(
    table: Table,
    forward_s: float,
    backward_s: float,
    weight_s: float = 0.0,
    together_s: float | None = None,
    send_s: float = 0.0,
) -> float:
    """The idle share of the step if a stage starts its next slot as soon as its inputs have arrived."""
    return uneven_bubble(table, _slot_seconds(table, forward_s, backward_s, weight_s, together_s), send_s)


def uneven_bubble(table: Table, slot_s: SlotSeconds, send_s: float = 0.0) -> float:
    """The idle share of the step, from the seconds of each slot."""
    return _idle(slot_s, _simulated_s(table, slot_s, send_s))


def lock_step_bubble(
    table: Table, forward_s: float, backward_s: float, weight_s: float = 0.0, together_s: float | None = None
) -> float:
    """The idle share of the step if all stages wait for each other after every tick."""
    slot_s = _slot_seconds(table, forward_s, backward_s, weight_s, together_s)
    return _idle(slot_s, sum(map(max, slot_s)))


def _slot_seconds(
    table: Table, forward_s: float, backward_s: float, weight_s: float, together_s: float | None
) -> SlotSeconds:
    times_s = {"F": forward_s, "B": backward_s + (0.0 if table.split_weight_grad else weight_s), "W": weight_s}

    def of(slot: StageTick) -> float:
        if slot.forward and slot.backward and together_s is not None:
            return together_s + (weight_s if slot.weight else 0.0)
        return sum(times_s[direction] for direction, _ in slot.tasks())

    return [[of(slot) for slot in slots] for slots in table.ticks]


def _simulated_s(table: Table, slot_s: SlotSeconds, send_s: float = 0.0) -> float:
    end_s: dict[TableTask, float] = {}
    free_s = [0.0] * table.stages
    for slots, seconds in zip(table.ticks, slot_s, strict=True):  # inputs are always of an earlier tick
        for stage, slot in enumerate(slots):
            tasks = [TableTask(direction, stage, work) for direction, work in slot.tasks()]
            needs = [need for task in tasks for need in inputs(task, table.stages, table.chunks) if need not in tasks]
            ready_s = [end_s[need] + (send_s if need.stage != stage else 0.0) for need in needs]
            free_s[stage] = max([free_s[stage], *ready_s]) + seconds[stage]
            end_s |= dict.fromkeys(tasks, free_s[stage])
    return max(free_s)


def _idle(slot_s: SlotSeconds, whole_s: float) -> float:
    return 1 - sum(map(sum, slot_s)) / (len(slot_s[0]) * whole_s)
