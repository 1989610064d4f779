"""FSMoE's partition of gradients against buckets, by simulation, over a grid: python profiling/gradient_partition.py

Simulates equal MoE layers with sharded experts, whose gradients are summed over devices between all-to-alls. FSMoE
(section 5) sends one message in each gap: step 1 fills the time that the layers' exchanges leave free, step 2
(differential evolution) adds to these messages what would be left for the end. `grad_reduce=bucketed` splits gradients
into equal buckets, of the best size here, which are reduced wherever no exchange is ready. Both use the best number of
parts per layer.

Both are planned twice: with the times of the simulation, and with times that are off by up to a fifth. Takes about
three minutes. Writes results/gradient_partition.json.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from results_file import quartiles, rounded, write_result
from scipy.optimize import differential_evolution

from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.simulate import simulate
from moe_jax.schedule.actions import Action, Seconds
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape

POLICY = "expert_pipeline"
LAYERS = 6
DEGREES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 12)  # numbers of buckets of a layer's gradients
WRONG = 1.2  # largest factor by which assumed times are off
# of a layer, forward, in units of an all-to-all without its start-up time
GRID: Mapping[str, tuple[float, ...]] = {
    "alpha": (0.01, 0.05),
    "gather": (0.3, 1.0, 2.0),
    "expert": (0.5, 1.0, 2.0, 4.0),
    "dense": (0.5, 1.0, 2.0),
    "gradient": (0.5, 2.0, 6.0),
}


class Case(NamedTuple):
    """Seconds of one layer's tasks, unsplit and without start-up times; `alpha` is the start-up time of any task."""

    alpha: float
    gather: float  # as long as a scatter
    expert: float
    dense: float  # everything outside of the MoE layer
    gradient: float  # sum over devices

    def layer_s(self, degree: int, sum_s: float) -> float:
        """Return seconds of an MoE layer's backward pass with sums of gradients: FSMoE's four cases (section 4.2)."""
        exchange, gather, expert = (self.part_s(op, degree) for op in ("dispatch", "gather", "expert"))
        return max(
            2 * degree * exchange + sum_s,
            2 * exchange + 2 * gather + degree * expert,
            2 * degree * exchange + 2 * gather,
            2 * exchange + 2 * degree * gather,
        )

    def part_s(self, op: str, degree: int) -> float:
        """Return seconds of one of `degree` parts of a backward task; tasks with weights take two forward tasks."""
        whole = {"attend": 2 * self.dense, "expert": 2 * self.expert, "gather": self.gather, "scatter": self.gather}
        parts = 1 if op == "attend" else degree
        return self.alpha + whole.get(op, 1.0) / parts if op not in ("embed", "head") else 0.0


class Piece(NamedTuple):
    """A piece of one layer's gradients."""

    layer: int
    seconds: float


Gap = tuple[str, int]  # a layer's exchange; the message is sent after its last part
Messages = dict[Gap, list[Piece]]


def fill(case: Case, degree: int, extra: Sequence[float]) -> tuple[float, Messages]:
    """Return the time of the backward pass and the messages of each gap.

    `extra` is the share, for the gap of each MoE layer, of the gradients that did not fit into it and are sent there
    anyway. A gradient exists once its layer's backward pass is done.
    """
    waiting: deque[Piece] = deque()
    messages: Messages = {}
    free_s = case.layer_s(degree, 0.0) - 2 * degree * case.part_s("dispatch", degree)
    dense_s = case.part_s("attend", degree)
    time_s = 0.0

    def send(gap: Gap, gap_s: float, share: float = 0.0) -> float:
        """Return the time of a message that fits, or is longer by a share of the remaining gradients."""
        left = sum(piece.seconds for piece in waiting)
        fits = min(left, max(gap_s - case.alpha, 0.0))
        amount = fits + share * (left - fits)
        if amount <= 1e-9:
            return 0.0
        messages[gap] = list(_taken(waiting, amount))
        return case.alpha + amount

    for layer in reversed(range(LAYERS)):
        share = extra[layer] if layer < LAYERS - 1 else 0.0
        time_s += case.layer_s(degree, send(("combine", layer), free_s, share))
        send(("dispatch", layer), dense_s)
        time_s += dense_s
        waiting.append(Piece(layer, case.gradient))
    return time_s + send(("attend", 0), float("inf")), messages


def _taken(waiting: deque[Piece], amount: float) -> Iterator[Piece]:
    """Yield pieces of the oldest gradients that add up to `amount`."""
    while waiting and amount > 1e-9:
        piece = waiting.popleft()
        taken = min(piece.seconds, amount)
        yield Piece(piece.layer, taken)
        amount -= taken
        if piece.seconds - taken > 1e-9:
            waiting.appendleft(Piece(piece.layer, piece.seconds - taken))


def both_steps(case: Case, degree: int) -> list[float]:
    """Return the shares of step 2 that minimise the time of the backward pass."""
    found = differential_evolution(
        lambda extra: fill(case, degree, extra)[0],
        [(0.0, 1.0)] * (LAYERS - 1),
        x0=[0.0] * (LAYERS - 1),
        popsize=8,
        maxiter=30,
        seed=0,
        polish=False,
    )
    return list(found.x)


class Sum(NamedTuple):
    """A task that sums gradients."""

    share: float  # of a layer's gradients
    starts: bool  # whether it is a message of its own, not part of the previous one


class BackwardOrder(NamedTuple):
    """An order of the backward pass, with its sums of gradients."""

    degree: int
    schedule: Schedule
    sums: Mapping[Action, Sum]

    def seconds(self, case: Case) -> float:
        """Simulate the backward pass and return its seconds."""
        return simulate(self.schedule, _seconds(case, self.degree, self.sums)).makespan_s


def partitioned(case: Case) -> Iterator[BackwardOrder]:
    """Yield the orders with FSMoE's messages."""
    for degree in DEGREES:
        sums: dict[Action, Sum] = {}
        messages: dict[Gap, list[Action]] = {}
        sent = [0] * LAYERS
        for gap, pieces in fill(case, degree, both_steps(case, degree))[1].items():
            messages[gap] = [Action("G", "reduce", piece.layer, sent[piece.layer]) for piece in pieces]
            for task, piece in zip(messages[gap], pieces, strict=True):
                sums[task] = Sum(piece.seconds / case.gradient, starts=task == messages[gap][0])
                sent[piece.layer] += 1
        issued: list[Action] = []
        for task in make_schedule(POLICY, _shape(degree, [0] * LAYERS), _seconds(case, degree, {})).actions:
            last = task.direction == "B" and task.part == 0  # backward, parts run from the last to the first
            issued += [task, *(messages.get((task.op, task.block), []) if last else [])]
        yield BackwardOrder(degree, Schedule(POLICY, _shape(degree, sent), tuple(issued)), sums)


def chunked(case: Case) -> Iterator[BackwardOrder]:
    """Yield the orders with each layer's gradients in equal buckets."""
    for degree, count in itertools.product(DEGREES, CHUNKS):
        layers = itertools.product(range(LAYERS), range(count))
        sums = {Action("G", "reduce", layer, chunk): Sum(1 / count, starts=True) for layer, chunk in layers}
        shape = _shape(degree, [count] * LAYERS)
        yield BackwardOrder(degree, make_schedule(POLICY, shape, _seconds(case, degree, sums)), sums)


def _shape(degree: int, sums: Sequence[int]) -> StepShape:
    reductions = (0, *sums, 0)
    kinds = ("moe",) * LAYERS
    return make_shape(POLICY, kinds, degree, grad_reduce="bucketed", reductions=reductions, sharded_experts=True)


def _seconds(case: Case, degree: int, sums: Mapping[Action, Sum]) -> Seconds:
    def seconds(task: Action) -> float:
        if task in sums:
            return sums[task].share * case.gradient + case.alpha * sums[task].starts
        return case.part_s(task.op, degree) if task.direction == "B" else 0.0

    return seconds


def main() -> None:
    """Simulate all cases and write the results."""
    CommandParser(prog="python profiling/gradient_partition.py", description=__doc__).parse_args()
    rng = random.Random(0)
    gained: list[float] = []
    ratios: dict[str, list[float]] = {"times_known": [], "times_wrong": []}
    for values in itertools.product(*GRID.values()):
        case = Case(*values)
        wrong = Case(case.alpha, *(value * WRONG ** rng.uniform(-1, 1) for value in values[1:]))
        for name, assumed in (("times_known", case), ("times_wrong", wrong)):
            seconds = [
                min(orders(assumed), key=lambda order: order.seconds(assumed)).seconds(case)
                for orders in (chunked, partitioned)
            ]
            ratios[name].append(seconds[0] / seconds[1])
        one_step = min(fill(case, degree, [0.0] * LAYERS)[0] for degree in DEGREES)
        two_steps = min(fill(case, degree, both_steps(case, degree))[0] for degree in DEGREES)
        gained.append(1 - two_steps / one_step)
    found: dict[str, Any] = {"grid": GRID, "layers": LAYERS, "wrong_by_up_to": WRONG, "cases": len(gained)}
    found["most_gained_by_step_2"] = rounded(max(gained))
    found["chunked_over_partition"] = {name: _summary(each) for name, each in ratios.items()}
    write_result("gradient_partition", found)


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    within = sum(ratio <= 1.01 for ratio in ratios) / len(ratios)
    ends = {"least": rounded(min(ratios)), "most": rounded(max(ratios))}
    return quartiles(ratios) | ends | {"share_within_1_percent": rounded(within)}


if __name__ == "__main__":
    run_command(main)
