"""Compilation of the best plan for the cluster's hardware, which is not required, to correct the estimates.

Simulated steps do not know what a compiler makes of an order of tasks. So a plan with such an order is compared, as
compiled, with the step in which the compiler decides the order.
"""

import dataclasses
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_jax.config import ScheduleConfig
from moe_jax.config.draft import Draft
from moe_jax.config.yaml_io import to_yaml
from moe_jax.measure.targets import Target, TargetError, check_compiler, find_target
from moe_jax.plan.candidates import divisors
from moe_jax.plan.clusters import PRESETS, Cluster
from moe_jax.plan.plan_text import plan_text
from moe_jax.plan.planner import PlanError, Plans, plan
from moe_jax.plan.units import amount, seconds, size
from moe_jax.report.compiled import Compiled, CompileError, Job, analyse, compile_job

_MOST = 3  # the most plans that are compiled for one that fits
# what gives tasks an order
_ORDER = (
    *("policy", "microbatches", "backward_microbatches", "expert_chunks"),
    *("weight_grad", "grad_reduce", "bucket_cap_mb"),
)
_GIB = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """A plan and its compiled step."""

    plans: Plans
    target: Target
    allocated_bytes: float  # memory of one device
    compiled: Compiled | None  # None: the compiler rejected the step because it does not fit in memory

    @property
    def memory_factor(self) -> float:
        """The allocated memory over the predicted memory."""
        return self.allocated_bytes / self.plans.best.memory.total

    @property
    def step_factor(self) -> float:
        """The time of the compiled step over that of the predicted one."""
        assert self.compiled is not None
        return self.compiled.replay.step_s / self.plans.best.estimate.step_s

    @property
    def fits(self) -> bool:
        limit = self.plans.cluster.device.memory_bytes
        return self.compiled is not None and (limit is None or self.allocated_bytes <= limit)


def target_of(cluster: Cluster) -> Target:
    """Return the compile target for a cluster. Raises TargetError if there is none."""
    kind = next((kind for kind, preset in PRESETS.items() if preset.device.name == cluster.device.name), None)
    if kind is None:
        raise TargetError(
            f"--compile: {cluster.name} is no preset, and no compiler is known for it: name one, as h100x64"
        )
    platform, count = cluster.device.platform, cluster.devices
    if platform == "cpu":
        layout = str(count)
    elif platform == "gpu":
        layout = f"1x{count // cluster.node_devices}x{cluster.node_devices}"
    elif count > cluster.node_devices:
        raise TargetError(f"--compile: {cluster.name} has several slices, and the compiler knows one: use one slice")
    else:
        sides = _sides(count // (2 if kind == "tpu7x" else 1), cluster.levels[0].dimensions or 3)
        layout = "x".join(map(str, sides))
    target = find_target(f"{kind}:{layout}")
    check_compiler(target)
    return target


def compile_plans(draft: Draft, cluster: Cluster, report: Callable[[str], None]) -> CompiledPlan:
    """Plan and compile. If the compiled step does not fit, plan again with the estimates of memory corrected. If a step
    without an order of tasks is faster as compiled, that is the plan.

    `report` receives the text of each plan, and then of its compiled step. Raises UserError, also if nothing fits.
    """
    target, memory_factor = target_of(cluster), 1.0
    for _ in range(_MOST):
        plans = plan(draft, cluster, memory_factor)
        report(plan_text(plans))
        found = _compile(plans, target)
        report(describe(found))
        if found.fits:
            return _faster(found, draft, max(memory_factor, found.memory_factor), report)
        memory_factor = max(memory_factor, found.memory_factor)
    raise CompileError(
        f"--compile {target.name}: none of {_MOST} plans fits: "
        "use a larger cluster, or a smaller train.batch_size or exchange.rank_capacity_factor"
    )


def _faster(ordered: CompiledPlan, draft: Draft, memory_factor: float, report: Callable[[str], None]) -> CompiledPlan:
    """Return the faster one of a compiled plan and, if `draft` leaves that open, its mesh without an order of tasks."""
    facts = ordered.plans.config.step_facts
    if "schedule.policy" not in draft.open or not facts.orders_tasks or facts.has_ticks:
        return ordered
    defaults = {name: getattr(ScheduleConfig(), name) for name in _ORDER if f"schedule.{name}" in draft.open}
    plain = dataclasses.replace(
        draft,
        mesh=ordered.plans.config.mesh,
        schedule=dataclasses.replace(draft.schedule, **defaults),
        open=frozenset(name for name in draft.open if not name.startswith("mesh."))
        - {f"schedule.{name}" for name in defaults},
    )
    try:
        plans = plan(plain, ordered.plans.cluster, memory_factor)
        if plans.config.step_facts.orders_tasks:  # by a setting that is not open
            return ordered
        unordered = _compile(plans, ordered.target)
    except (CompileError, PlanError) as error:
        report(f"unordered   no such step: {error}")
        return ordered
    assert ordered.compiled is not None
    if unordered.compiled is None or not unordered.fits:
        report(f"unordered   needs {size(unordered.allocated_bytes)}, does not fit")
        return ordered
    ordered_s, unordered_s = ordered.compiled.replay.step_s, unordered.compiled.replay.step_s
    chosen = unordered if unordered_s < ordered_s else ordered
    order = "is the plan" if chosen is unordered else "the order of tasks is kept"
    report(f"unordered   {seconds(unordered_s)} as compiled, × {unordered_s / ordered_s:.2f}: {order}")
    if chosen is unordered:
        report(plan_text(plans))
        report(describe(unordered))
    return chosen


def _compile(plans: Plans, target: Target) -> CompiledPlan:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "planned.yaml"
        config.write_text(to_yaml(plans.config), encoding="utf-8")
        try:
            text, outcome = compile_job(target, Job(target=target.name, config=str(config), overrides=[], options={}))
        except CompileError as error:
            if (allocated := _required_bytes(str(error))) is None:
                raise
            return CompiledPlan(plans=plans, target=target, allocated_bytes=allocated, compiled=None)
    allocated = outcome.argument_bytes + outcome.temporary_bytes + outcome.result_bytes
    compiled = analyse("planned", text, outcome, target)
    return CompiledPlan(plans=plans, target=target, allocated_bytes=allocated, compiled=compiled)


def _required_bytes(message: str) -> float | None:
    """Return the bytes that a program requires, from the message of a compiler that rejects it, or None."""
    found = re.search(r"(?:hbm usage >= |Used )([\d.]+)([KMGT])", message)
    return float(found[1]) * _GIB[found[2]] if found else None


def describe(found: CompiledPlan) -> str:
    """Return predicted and compiled numbers, and the factors between them, as text."""
    best, memory, limit = found.plans.best, found.memory_factor, found.plans.cluster.device.memory_bytes
    limit_text = "" if limit is None else f", of {size(limit)}"
    if found.compiled is None:
        return (
            f"refused     for {found.target.name}: memory predicted {size(best.memory.total)}, "
            f"wanted {size(found.allocated_bytes)}{limit_text}: × {memory:.2f}"
        )
    outcome, replay, busy = found.compiled.outcome, found.compiled.replay, best.estimate.busy
    parts = f"arguments {size(outcome.argument_bytes)}, temporaries {size(outcome.temporary_bytes)}"
    lines = [
        f"compiled    for {found.target.name} in {outcome.compile_s:.0f} s, "
        + ", ".join(f"{name} {version}" for name, version in outcome.versions.items()),
        f"memory      predicted {size(best.memory.total)}, compiled {size(found.allocated_bytes)} "
        f"({parts}){limit_text}: × {memory:.2f}" + ("" if found.fits else ", does not fit"),
        f"step        predicted {seconds(best.estimate.step_s)}, compiled {seconds(replay.step_s)} by the compiler's "
        f"instructions: × {found.step_factor:.2f}",
        f"exposed     predicted {_share(busy.exposed, busy.exchange + busy.sums)}, "
        f"compiled {_share(replay.exposed_s, replay.communication_s)}",
        f"corrected   {_corrected(found)}",
    ]
    return "\n".join(lines)


def _share(exposed_s: float, communication_s: float) -> str:
    hidden = 1 - exposed_s / max(communication_s, 1e-12)
    return f"{seconds(exposed_s)} of {seconds(communication_s)} ({hidden:.0%} hidden)"


def _corrected(found: CompiledPlan) -> str:
    """Return the plan's estimate, corrected by the compiled step, as text."""
    estimate, factor = found.plans.best.estimate, found.step_factor
    numbers = [
        f"step {seconds(factor * estimate.step_s)}",
        f"MFU {estimate.mfu / factor:.1%}",
        f"{estimate.tokens_per_s / factor:,.0f} tokens/s",
    ]
    if estimate.joules_per_token is not None:
        numbers.append(f"{factor * estimate.joules_per_token:.3g} J per token")
    if estimate.dollars_per_billion_tokens is not None:
        numbers.append(f"{amount(factor * estimate.dollars_per_billion_tokens)} $ per billion tokens")
    return ", ".join(numbers)


def _sides(count: int, dimensions: int) -> list[int]:
    """Return the sides of a slice of `count` chips, as equal as possible; sides of 1 are the last."""
    if dimensions == 1:
        return [count]
    shapes = ([side, *_sides(count // side, dimensions - 1)] for side in divisors(count))
    best = min(shapes, key=lambda sides: (max(sides), sum(sides)))
    return sorted(best, key=lambda side: (side == 1, side))
