"""The forward pass of a step in groups of ops, and which ranges of groups to split into how many parts.

Dynamic programming finds the ranges (Lancet, section 5.1): T(n) = min over i of T(i) + min over κ of P(i, n, κ), where
T(n) is the best time of the first n groups and P the time of groups i to n in κ parts, in which the exchanges of one
part overlap with the compute of another.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, pairwise
from math import inf
from typing import NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.plan.axes import CutAxis, Op, find_cut, forward_ops
from moe_jax.plan.candidates import policies
from moe_jax.plan.estimate import Estimate
from moe_jax.plan.resources import attention_matrices, gate_matrices, mean_mlp_width, mixed_matrices
from moe_jax.plan.step_times import Step
from moe_jax.schedule.actions import Action, two_streams
from moe_jax.schedule.simulation import simulate_streams


class OpRange(NamedTuple):
    """The groups [first, stop), which run in `parts` parts."""

    first: int
    stop: int
    parts: int


class Partition(NamedTuple):
    """All groups in consecutive ranges."""

    seconds: float
    ranges: tuple[OpRange, ...]


class RangePart(NamedTuple):
    """One part of a group: an exchange, or compute."""

    exchange: bool
    seconds: float


def fastest_partition(
    groups: int, longest: int, most_parts: int, seconds: Callable[[int, int, int], float]
) -> Partition:
    """The fastest partition into ranges of at most `longest` groups; among equals the one with fewer parts.

    `seconds(first, stop, parts)` is infinite for a range that may not be split. Unsplit groups are ranges of one group.
    """
    best = [Partition(0.0, ())]
    for stop in range(1, groups + 1):
        shortest = [OpRange(stop - 1, stop, 1)]
        cut = (
            OpRange(first, stop, parts)
            for first in range(max(stop - longest, 0), stop)
            for parts in range(2, most_parts + 1)
        )
        options = (
            Partition(best[each.first].seconds + seconds(*each), (*best[each.first].ranges, each))
            for each in (*shortest, *cut)
        )
        best.append(min(options, key=lambda option: option.seconds))
    return best[groups]


@lru_cache(maxsize=4096)
def pipeline_seconds(groups: tuple[RangePart, ...], parts: int) -> float:
    """Seconds of consecutive groups in `parts` equal parts: compute of all parts, then the next compute of all."""
    stages = [(kind, sum(each.seconds for each in run)) for kind, run in groupby(groups, lambda each: each.exchange)]
    tasks = [
        [Action("F", "dispatch" if exchange else "expert", stage, part) for part in range(parts)]
        for stage, (exchange, _) in enumerate(stages)
    ]
    needs = {task: frozenset[Action]() for task in tasks[0]}
    needs |= {task: frozenset({before}) for pair in pairwise(tasks) for before, task in zip(*pair, strict=True)}
    spans = simulate_streams(chain(*tasks), needs, lambda task: stages[task.block][1], two_streams)
    return max(span.end_s for span in spans.values())


MOST_PARTS = 8
_GROUPS = 5  # approximate number of compute groups between two exchanges


class OpGroup(NamedTuple):
    """Neighbouring ops; a range has all of them or none."""

    ops: tuple[Op, ...]
    part: tuple[RangePart, ...]  # the duration of one part, if split into 1, 2, … parts


class CutRange(NamedTuple):
    """A range of ops from `first` to `last`, split into `parts` parts."""

    first: str
    last: str
    parts: int

    @property
    def policy(self) -> str:
        """The policy that splits the same ops in every layer."""
        inside = (("dispatch", "expert"), ("dispatch", "combine"), ("expert", "combine"))
        return policies("capacity" if (self.first, self.last) in inside else "batch")[0]


@dataclass(frozen=True)
class ForwardPlan:
    """The forward pass of the blocks: its best ranges, and its time in the estimate's schedule."""

    groups: tuple[OpGroup, ...]
    best: Partition
    scheduled_s: float

    @property
    def uncut_s(self) -> float:
        return sum(group.part[0].seconds for group in self.groups)

    @property
    def cut(self) -> Counter[CutRange]:
        """The ranges that are split, and how often they occur."""
        return Counter(
            CutRange(self.groups[first].ops[0].name, self.groups[stop - 1].ops[-1].name, parts)
            for first, stop, parts in self.best.ranges
            if parts > 1
        )


def best_ranges(estimate: Estimate) -> ForwardPlan:
    """The best ranges of the simulated blocks. A range is at most as long as from one MoE layer to the next."""
    step, shape = Step(estimate.config, estimate.cluster), estimate.timeline.schedule.shape
    groups = tuple(_groups(step, shape.kinds))
    layers = [i for i, group in enumerate(groups) if group.ops[0].task == "dispatch"]
    longest = max((after - before for before, after in pairwise(layers)), default=len(groups))

    def seconds(first: int, stop: int, parts: int) -> float:
        part = tuple(group.part[parts - 1] for group in groups[first:stop])
        if parts > 1:
            ops = [op for group in groups[first:stop] for op in group.ops]
            hides = any(each.exchange and each.seconds for each in part)
            if not hides or find_cut(ops, _allowed(step, parts)) is None:
                return inf
        return pipeline_seconds(part, parts)

    spans = [task for task in estimate.timeline.tasks if task.action.direction == "F" and task.action.block >= 0]
    return ForwardPlan(
        groups=groups,
        best=fastest_partition(len(groups), longest, MOST_PARTS, seconds),
        scheduled_s=max(task.end_s for task in spans) - min(task.start_s for task in spans),
    )


def _allowed(step: Step, parts: int) -> list[CutAxis]:
    """The axes that can be split into this many equal parts; slots are split as equally as possible."""
    sizes = {
        CutAxis.SEQUENCES: step.sequences,
        CutAxis.RAGGED: step.sequences,
        CutAxis.TOKENS: step.config.data.seq_len,
        CutAxis.HEADS: step.config.model.num_attention_heads / step.tensor,
        CutAxis.FEATURES: step.config.model.hidden_size,
    }
    return [CutAxis.SLOTS, *(cut for cut, size in sizes.items() if size % parts == 0)]


def _groups(step: Step, kinds: Sequence[str]) -> Iterator[OpGroup]:
    """Group the ops: exchanges and experts one by one, compute between them in about five groups of equal duration."""
    cost = _Costs(step, kinds)
    for _, run in groupby(forward_ops(step.config.model, kinds), key=lambda op: op.task):
        ops = list(run)
        limit = sum(cost.seconds(op, 1) for op in ops) / _GROUPS
        start = 0
        for stop in range(1, len(ops) + 1):
            parts = [
                RangePart(cost.is_exchange(ops[start]), sum(cost.seconds(op, parts) for op in ops[start:stop]))
                for parts in range(1, MOST_PARTS + 1)
            ]
            if stop == len(ops) or parts[0].seconds >= limit > 0:
                yield OpGroup(tuple(ops[start:stop]), tuple(parts))
                start = stop


class _Costs:
    """Durations of ops.

    Matrix products take a share of their block's time by their parameters. Attention takes its squares in addition.
    """

    def __init__(self, step: Step, kinds: Sequence[str]):
        self._times, self._squares_s, self._kinds = step.times, step.squares_s(), kinds
        self._compute = step.compute()
        self._shares = {kind: _shares(step.config.model, kind) for kind in set(kinds)}

    def is_exchange(self, op: Op) -> bool:
        return op.task in self._times.transfer

    def seconds(self, op: Op, parts: int) -> float:
        """Seconds of one of `parts` equal parts of an op."""
        if self.is_exchange(op):
            transfer = self._times.transfer[op.task]
            return transfer.link.seconds(transfer.num_bytes, parts)
        if op.task == "expert":
            experts = self._compute["expert"]
            return experts.weights_s + experts.of("F", parts)
        kind = self._kinds[op.block]
        block = self._compute["attend" if kind == "moe" else "dense"]
        share = self._shares[kind].get(op.name, 0.0)
        squares_s = self._squares_s if op.name == "attention" else 0.0
        return share * (block.weights_s + block.of("F", parts) - self._squares_s / parts) + squares_s / parts


def _shares(model: ModelConfig, kind: str) -> Mapping[str, float]:
    """The share of each op in a block's matrix-product parameters, without experts.

    Ops without such parameters count as part of their neighbours.
    """
    moe, matrices = model.moe, 3 if model.is_gated else 2
    hidden = mean_mlp_width(model) if kind == "dense" else float(model.intermediate_size * moe.dense_residual)
    hidden += moe.intermediate_size * moe.num_shared_experts if kind == "moe" else 0
    output = model.hidden_size * model.num_attention_heads * model.v_width
    parameters = {
        "projections": attention_matrices(model) - output,
        "output": output,
        "mlp": matrices * model.hidden_size * hidden,
        "gate": gate_matrices(model) + mixed_matrices(model) if kind == "moe" else 0,
    }
    return {name: count / sum(parameters.values()) for name, count in parameters.items()}
