"""The best plan, compiled for the cluster's hardware, which need not be there: what the estimates missed."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_jax.config.draft import Draft
from moe_jax.config.yaml_io import to_yaml
from moe_jax.measure.targets import Target, TargetError, check_compiler, find_target
from moe_jax.plan.candidates import divisors
from moe_jax.plan.clusters import PRESETS, Cluster
from moe_jax.plan.plan_text import dollars, plan_text, seconds, size
from moe_jax.plan.planner import Plans, plan
from moe_jax.report.compiled import Compiled, CompileError, Job, analyse, compile_job

_MOST = 3  # plans that are compiled
_GIB = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A plan, and what the compiler made of it."""

    plans: Plans
    target: Target
    allocated_bytes: float  # of a device
    compiled: Compiled | None  # None: refused for want of memory

    @property
    def memory_factor(self) -> float:
        """What is allocated over what was predicted."""
        return self.allocated_bytes / self.plans.best.memory.total

    @property
    def step_factor(self) -> float:
        """The compiled step over the predicted one."""
        assert self.compiled is not None
        return self.compiled.replay.step_s / self.plans.best.estimate.step_s

    @property
    def fits(self) -> bool:
        limit = self.plans.cluster.device.memory_bytes
        return self.compiled is not None and (limit is None or self.allocated_bytes <= limit)


def target_of(cluster: Cluster) -> Target:
    """What to compile for. Raises TargetError."""
    kind = next((kind for kind, preset in PRESETS.items() if preset.device == cluster.device), None)
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


def compile_plans(draft: Draft, cluster: Cluster, tell: Callable[[str], None]) -> Checked:
    """The best plan, compiled; if it does not fit, the next that would by the memory compiled so far.

    Tells each plan, and then what became of it. Raises UserError, also if nothing fits.
    """
    target, memory_factor = target_of(cluster), 1.0
    for _ in range(_MOST):
        plans = plan(draft, cluster, memory_factor)
        tell(plan_text(plans))
        checked = _check(plans, target)
        tell(describe(checked))
        if checked.fits:
            return checked
        memory_factor = max(memory_factor, checked.memory_factor)
    raise CompileError(
        f"--compile {target.name}: none of {_MOST} plans fits: "
        "use a larger cluster, or a smaller train.batch_size or exchange.rank_capacity_factor"
    )


def _check(plans: Plans, target: Target) -> Checked:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "planned.yaml"
        config.write_text(to_yaml(plans.config), encoding="utf-8")
        try:
            text, outcome = compile_job(target, Job(target=target.name, config=str(config), overrides=[], options={}))
        except CompileError as error:
            if (allocated := _wanted(str(error))) is None:
                raise
            return Checked(plans=plans, target=target, allocated_bytes=allocated, compiled=None)
    allocated = outcome.argument_bytes + outcome.temporary_bytes + outcome.result_bytes
    compiled = analyse("planned", text, outcome, target)
    return Checked(plans=plans, target=target, allocated_bytes=allocated, compiled=compiled)


def _wanted(refusal: str) -> float | None:
    """Bytes that a program would take, of a compiler that refuses it."""
    found = re.search(r"(?:hbm usage >= |Used )([\d.]+)([KMGT])", refusal)
    return float(found[1]) * _GIB[found[2]] if found else None


def describe(checked: Checked) -> str:
    """Predicted, compiled, and the factors between them."""
    best, memory, limit = checked.plans.best, checked.memory_factor, checked.plans.cluster.device.memory_bytes
    room = "" if limit is None else f", of {size(limit)}"
    if checked.compiled is None:
        return (
            f"refused     for {checked.target.name}: memory predicted {size(best.memory.total)}, "
            f"wanted {size(checked.allocated_bytes)}{room}: × {memory:.2f}"
        )
    outcome, replay, busy = checked.compiled.outcome, checked.compiled.replay, best.estimate.busy
    parts = f"arguments {size(outcome.argument_bytes)}, temporaries {size(outcome.temporary_bytes)}"
    lines = [
        f"compiled    for {checked.target.name} in {outcome.compile_s:.0f} s, "
        + ", ".join(f"{name} {version}" for name, version in outcome.versions.items()),
        f"memory      predicted {size(best.memory.total)}, compiled {size(checked.allocated_bytes)} "
        f"({parts}){room}: × {memory:.2f}" + ("" if checked.fits else ", does not fit"),
        f"step        predicted {seconds(best.estimate.step_s)}, compiled {seconds(replay.step_s)} by the compiler's "
        f"instructions: × {checked.step_factor:.2f}",
        f"exposed     predicted {_share(busy.exposed, busy.exchange + busy.sums)}, "
        f"compiled {_share(replay.exposed_s, replay.communication_s)}",
        f"corrected   {_corrected(checked)}",
    ]
    return "\n".join(lines)


def _share(exposed_s: float, communication_s: float) -> str:
    hidden = 1 - exposed_s / max(communication_s, 1e-12)
    return f"{seconds(exposed_s)} of {seconds(communication_s)} ({hidden:.0%} hidden)"


def _corrected(checked: Checked) -> str:
    """The estimate, by the compiled step."""
    found, factor = checked.plans.best.estimate, checked.step_factor
    words = [
        f"step {seconds(factor * found.step_s)}",
        f"MFU {found.mfu / factor:.1%}",
        f"{found.tokens_per_s / factor:,.0f} tokens/s",
    ]
    if found.joules_per_token is not None:
        words.append(f"{factor * found.joules_per_token:.3g} J per token")
    if found.dollars_per_billion_tokens is not None:
        words.append(f"{dollars(factor * found.dollars_per_billion_tokens)} $ per billion tokens")
    return ", ".join(words)


def _sides(count: int, dimensions: int) -> list[int]:
    """Of a slice of so many chips, as equal as they can be; sides of 1 are the last."""
    if dimensions == 1:
        return [count]
    ways = ([side, *_sides(count // side, dimensions - 1)] for side in divisors(count))
    best = min(ways, key=lambda sides: (max(sides), sum(sides)))
    return sorted(best, key=lambda side: (side == 1, side))
