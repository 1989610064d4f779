"""Compiled steps as text: key numbers, a table of collectives, differences from the schedule, and a comparison."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from moe_jax.measure.overlap import Collective, Replay
from moe_jax.measure.provenance import STEP_PROGRAM
from moe_jax.measure.targets import Target
from moe_jax.measure.tasks import Match, action_of
from moe_jax.report.compiled import Compiled, Outcome
from moe_jax.schedule.actions import Action

TextRow = tuple[str, ...]


def describe(compiled: Compiled) -> str:
    """Return the description of one variant."""
    outcome, result = compiled.outcome, compiled.replay
    facts: list[TextRow] = [
        ("memory per device", f"{_gb(outcome.argument_bytes)} arguments, {_gb(outcome.temporary_bytes)} temporaries"),
        ("compiled", f"in {outcome.compile_s:.0f} s, {', '.join(f'{k} {v}' for k, v in outcome.versions.items())}"),
        *_program_facts(outcome),
        (
            "estimated step",
            f"{ms(result.step_s)} ms = compute {ms(result.compute_s)} + exposed {ms(result.exposed_s)}"
            + (f" + idle, waiting for other stages {ms(result.idle_s)}" if result.idle_s else ""),
        ),
        ("communication", f"{ms(result.communication_s)} ms, of which hidden {ms(result.hidden_s)}"),
        ("compute, ms", ", ".join(f"{name} {ms(seconds)}" for name, seconds in _by_op(result).items())),
    ]
    if result.unknown_loops:
        facts.append(("loops taken once", f"{len(result.unknown_loops)} (their number of iterations is unknown)"))
    if result.balanced_loops:
        facts.append(("loops over rows", f"{len(result.balanced_loops)}, as long as balanced routing makes them"))
    if compiled.match:
        facts += _schedule_facts(compiled.match)
    return "\n".join([f"── {compiled.variant}", columns(facts), "", columns(list(_collective_rows(result))), ""])


def compare(variants: Sequence[Compiled]) -> str:
    """Return a table with a line per variant; ratios are relative to the first one's step."""
    rows: list[TextRow] = [
        ("variant", "step, ms", "ratio", "compute", "communication", "exposed", "temporaries", "compiled")
    ]
    for each in variants:
        result = each.replay
        rows.append(
            (
                each.variant,
                ms(result.step_s),
                f"{result.step_s / variants[0].replay.step_s:.3f}",
                ms(result.compute_s),
                ms(result.communication_s),
                ms(result.exposed_s),
                _gb(each.outcome.temporary_bytes),
                f"{each.outcome.compile_s:.0f} s",
            )
        )
    return columns(rows)


def assumptions(target: Target) -> str:
    """Return the assumptions of the estimated times, as text."""
    link = f"{target.link.alpha_s * 1e6:g} µs + bytes that leave a device at {1e-9 / target.link.beta_s:g} GB/s"
    if target.node_devices:
        network = f"{1e-9 / target.network.beta_s:g} GB/s between nodes"
        link += f" inside a node of {target.node_devices} and {network}, at once"
    peaks = (
        f"the longer of matrix products at {target.matrix_flops_per_s * 1e-12:g} TFLOP/s "
        f"and bytes at {target.memory_bytes_per_s * 1e-9:g} GB/s"
    )
    cycles = f"the compiler's cycles at {target.clock_hz * 1e-9:.2f} GHz, without them " if target.clock_hz else ""
    return (
        f"Estimated, not measured. Compute: {cycles}{peaks}. Collectives: {link}, one after another, "
        "concurrently with compute between their start and done. Prefetches are free; of a branch the cheaper side "
        "runs; overflow paths send no rows."
    )


def columns(rows: Sequence[TextRow]) -> str:
    """Return rows as aligned columns: the first one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    last = len(widths) - 1

    def cell(text: str, i: int) -> str:
        if i == last and last == 1:
            return text
        return text.ljust(widths[i]) if i == 0 else text.rjust(widths[i])

    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in rows)


def _program_facts(outcome: Outcome) -> Iterator[TextRow]:
    if outcome.fingerprint:
        yield "program", f"{outcome.fingerprint}, {STEP_PROGRAM!r} in provenance.json of a run that trains it"
    if outcome.untimed_product:
        yield "assumed", f"train.grouped_product={outcome.untimed_product}: with auto a run takes the fastest"
    if outcome.profile_steps:
        setting = f"schedule.profile_steps={outcome.profile_steps}"
        yield (
            "assumed",
            f"estimated times of instructions: with {setting} a run measures them, and keeps the faster step",
        )


def _collective_rows(result: Replay) -> Iterator[TextRow]:
    yield ("task", "collective", "", "number", "MB", "ms", "exposed", "inside: products", "compute ms")
    groups: dict[TextRow, list[Collective]] = defaultdict(list)
    for task in result.collectives:
        action = action_of(task.op_name)
        label = str(action) if action else _scope(task.op_name)
        groups[label, task.kind, "async" if task.is_async else "sync"].append(task)
    for names, tasks in groups.items():
        yield (
            *names,
            str(len(tasks)),
            f"{sum(task.num_bytes for task in tasks) / 1e6:.1f}",
            ms(sum(task.seconds for task in tasks)),
            ms(sum(task.exposed_s for task in tasks)),
            str(sum(task.inside_products for task in tasks)),
            ms(sum(task.inside_s for task in tasks)),
        )


def _schedule_facts(found: Match) -> Iterator[TextRow]:
    yield "schedule", f"{len(found.instructions)} of {found.num_tasks} tasks left instructions"
    yield "not issued", _listing(found.missing)
    yield "merged", _listing(["+".join(map(str, actions)) for actions in found.merged])
    yield "split", _listing([f"{action} into {count}" for action, count in found.split.items()])
    yield "moved", _listing(found.moved)
    yield (
        "no product",
        _listing(
            [
                a
                for a, n in found.products.items()
                if a.direction != "G" and a.op in ("attend", "expert", "head") and not n
            ]
        ),
    )


def _listing(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return (f"{len(items)}: {shown}" + (", …" if len(items) > 8 else "")) if items else "none"


def _by_op(result: Replay) -> dict[str, float]:
    """Return compute seconds by direction and op; instructions of no task go by the phase of autodiff."""
    seconds: dict[str, float] = defaultdict(float)
    for task in result.compute:
        action = action_of(task.op_name)
        seconds[_op(action) if action else _phase(task.op_name, task.products)] += task.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _op(action: Action) -> str:
    return f"{action.direction}.{action.op}"


def _phase(op_name: str, products: int) -> str:
    phase = "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "other"
    return f"{phase}, products" if products else phase


def _scope(op_name: str) -> str:
    """Return the two innermost scopes of a collective that belongs to no task."""
    return "/".join(op_name.split("/")[-2:]) or "compiler"


def ms(seconds: float) -> str:
    """Return a time in milliseconds, as text without the unit."""
    return f"{seconds * 1e3:.{1 if abs(seconds) >= 0.1 else 2 if abs(seconds) >= 1e-3 else 3}f}" if seconds else "0"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if math.isfinite(num_bytes) else "?"
