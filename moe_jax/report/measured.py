"""A traced step of a run, for comparison with the predicted and the compiled step."""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_jax.config.yaml_io import load_config
from moe_jax.files.untrusted import read_json, read_text
from moe_jax.measure.hlo import HloError, HloModule, parse
from moe_jax.measure.provenance import PROVENANCE
from moe_jax.measure.tasks import action_of
from moe_jax.measure.trace import (
    FILES,
    FOLDER,
    MOST_BYTES,
    PROGRAM,
    TracedOperation,
    TraceError,
    joined,
    of_one_device,
    read_trace,
)
from moe_jax.report.compiled import Compiled
from moe_jax.report.compiled_text import columns, ms
from moe_jax.schedule.schedule import Schedule
from moe_jax.telemetry.run_log import FILE_NAME, read_metrics

_MOST_LISTED = 5  # tasks
_WANTED = f"name the folder that log.trace_step filled, e.g. RUN/{FOLDER}/0"


class Traced(NamedTuple):
    """The program and the traced operations that `log.trace_step` wrote for one process."""

    folder: Path
    program: HloModule
    operations: list[TracedOperation]
    num_devices: int  # of all processes
    mesh: Mapping[str, int] | None  # devices along each axis; None if the trace is no longer in its run's folder

    @property
    def has_tasks(self) -> bool:
        """Whether operations belong to tasks of a schedule; those of a plain step do not."""
        return any(action_of(operation.task) for operation in self.operations)


class TracedStep(NamedTuple):
    """One device's operations in a traced step, with the compiled step of the same config."""

    folder: Path
    compiled: Compiled
    operations: list[TracedOperation]
    num_devices: int  # of the traced run
    mesh: Mapping[str, int] | None  # of the traced run, None if unknown

    @property
    def step_s(self) -> float:
        return max(each.end_s for each in self.operations) - min(each.start_s for each in self.operations)

    @property
    def ratio(self) -> float:
        """The measured step time over the estimated one."""
        return self.step_s / self.compiled.replay.step_s


def read_traced(folder: Path) -> Traced:
    """Read a trace and its program. Raises TraceError unless the folder has both, of one step."""
    if not folder.is_dir():
        raise TraceError(f"--trace {folder} is no folder: {_WANTED}")
    if not (folder / PROGRAM).is_file():
        inner = sorted(folder.glob(f"**/{PROGRAM}"))
        cure = f"did you mean {inner[0].parent}?" if inner else _WANTED
        raise TraceError(f"--trace {folder} has no {PROGRAM}: {cure}")
    if not any(folder.rglob(FILES)):
        raise TraceError(f"--trace {folder} has no {FILES} in it: let log.trace_step fill it again")
    text = read_text(folder / PROGRAM, MOST_BYTES, errors="replace")
    try:
        program, operations = parse(text), read_trace(folder, text)
    except HloError:
        raise TraceError(f"{folder / PROGRAM} is not scheduled HLO: let log.trace_step write it again") from None
    if not operations:
        raise TraceError(f"--trace {folder}: its trace holds nothing of {PROGRAM}: let log.trace_step fill it again")
    steps = _steps(program, operations)
    if steps > 1:
        raise TraceError(f"--trace {folder} is of {steps} steps: trace one, e.g. with log.trace_step=20")
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    num_devices = int(partitions[1]) if partitions else 1
    return Traced(folder, program, operations, num_devices, _mesh_of_run(folder, num_devices))


def _mesh_of_run(folder: Path, num_devices: int) -> Mapping[str, int] | None:
    """Return the mesh of the run in whose folder a trace is; None if there is no such run with as many devices."""
    try:
        sizes = {
            str(axis): int(size) for axis, size in read_json(folder.absolute().parents[1] / PROVENANCE)["mesh"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return sizes if math.prod(sizes.values()) == num_devices else None


def _steps(program: HloModule, operations: Sequence[TracedOperation]) -> int:
    """Return how often the program ran: as often as most of its instructions, since some cause several events."""
    own = {line.name for line in program.computations[program.entry]}
    runs = Counter((operation.device, operation.name) for operation in operations if operation.name in own)
    return statistics.mode(runs.values()) if runs else 1


def variant_of(
    config: str, overrides: Sequence[str], variants: Mapping[str, Sequence[str]], has_tasks: bool = True
) -> str:
    """Return the variant with the same config, or else the first one of its policy, for a trace that has tasks or not.

    Raises TraceError.
    """
    own = load_config(config, overrides)
    if own.step_facts.orders_tasks != has_tasks:
        kinds = ("scheduled", "schedules nothing") if has_tasks else ("plain", "orders tasks")
        raise TraceError(
            f"--trace is of a {kinds[0]} step, and --config {config} {kinds[1]} "
            f"(schedule.policy={own.schedule.policy}): name the config of the run that was traced"
        )
    others = {name: load_config(config, settings) for name, settings in variants.items()}
    alike = [
        name
        for name, each in others.items()
        if each.step_facts.orders_tasks == has_tasks and each.schedule.policy == own.schedule.policy
    ]
    if not alike:
        raise TraceError(
            f"--policies {','.join(variants)} lacks schedule.policy={own.schedule.policy} of the traced run: add it"
        )
    return min(alike, key=lambda name: others[name] != own)


def measure(traced: Traced, compiled: Compiled) -> TracedStep:
    """Return the operations of the first device, named as the tasks in the schedule of the compiled step, if any.

    Raises TraceError for tasks that this schedule does not have.
    """
    text = compiled.outcome.schedule
    schedule = None if text is None else Schedule.parse(text)
    operations = of_one_device(traced.operations, traced.program, schedule)
    if schedule is None:
        return TracedStep(traced.folder, compiled, operations, traced.num_devices, traced.mesh)
    strange = {action for each in operations if (action := action_of(each.task))} - set(schedule.actions)
    if strange:
        raise TraceError(
            f"--trace {traced.folder} has tasks that the schedule of --config lacks, such as {min(map(str, strange))}: "
            "name the config and the overrides of the run that was traced"
        )
    return TracedStep(traced.folder, compiled, operations, traced.num_devices, traced.mesh)


def describe_measured(measured: TracedStep) -> str:
    """Return the key numbers of a measured step, as text."""
    compute, communication = (
        [(each.start_s, each.end_s) for each in measured.operations if each.communicates == communicates]
        for communicates in (False, True)
    )
    hidden_s = _seconds(compute) + _seconds(communication) - _seconds(compute + communication)
    idle_s = measured.step_s - _seconds(compute + communication)
    facts = [
        ("measured step", f"{ms(measured.step_s)} ms, {measured.ratio:.3g} × the estimated one"),
        ("compute", f"{ms(_seconds(compute))} ms"),
        ("communication", f"{ms(_seconds(communication))} ms, of which hidden {ms(hidden_s)}"),
        ("idle", f"{ms(idle_s)} ms"),
        *_untraced(measured),
        ("longest compute", _longest_compute(measured.operations)),
        ("most exposed", _most_exposed(measured.operations)),
        *_other_mesh(measured),
    ]
    title = f"── {measured.compiled.variant}, measured: device {measured.operations[0].device} of {measured.folder}"
    return f"{title}\n{columns(facts)}\n"


def _most_exposed(operations: Sequence[TracedOperation]) -> str:
    """Name the tasks whose communication took longest without any compute at the same time."""
    compute = joined((each.start_s, each.end_s) for each in operations if not each.communicates)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in operations:
        if each.communicates:
            spans[_label(each)].append((each.start_s, each.end_s))
    return _longest({task: _seconds([*compute, *own]) - _seconds(compute) for task, own in spans.items()})


def _longest_compute(operations: Sequence[TracedOperation]) -> str:
    """Name the tasks that computed longest."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in operations:
        if not each.communicates:
            spans[_label(each)].append((each.start_s, each.end_s))
    return _longest({task: _seconds(own) for task, own in spans.items()})


def _longest(seconds: Mapping[str, float]) -> str:
    longest = sorted((task for task in seconds if seconds[task] > 0), key=lambda task: -seconds[task])
    return ", ".join(f"{task} {ms(seconds[task])} ms" for task in longest[:_MOST_LISTED]) or "none"


def _label(operation: TracedOperation) -> str:
    """Name an operation by its task, or in a plain step by its pass and by the part of the model or its kind."""
    if operation.task not in _PASSES:
        return operation.task or operation.part or _kind(operation)
    is_exchange = operation.part in ("dispatch", "combine")
    is_named = is_exchange if operation.communicates else bool(operation.part)
    words = [_PASSES[operation.task], operation.part, "" if is_named else _kind(operation)]
    return " ".join(filter(None, words))


_PASSES = {"F": "forward", "B": "backward"}


def _kind(operation: TracedOperation) -> str:
    return operation.name.rstrip(".0123456789") if operation.communicates else "other"


def _untraced(measured: TracedStep) -> Iterator[tuple[str, str]]:
    """Yield a line with the median time of the steps that the run recorded, if its folder has any."""
    run = measured.folder.absolute().parents[1]
    records = read_metrics(run) if (run / FILE_NAME).is_file() else []
    steps_s = [record["step_s"] for record in records if "step_s" in record]
    if steps_s:
        yield "other steps", f"{ms(statistics.median(steps_s))} ms, the median of the run's records"


def _other_mesh(measured: TracedStep) -> Iterator[tuple[str, str]]:
    """Yield a line if the traced run had other devices than the compiled step, or others along some axis."""
    there, here = (measured.num_devices, measured.mesh), measured.compiled.outcome
    if there[0] == here.num_devices and measured.mesh in (None, here.mesh):
        return
    yield (
        "another mesh",
        f"the trace is of {_mesh_text(*there)}, and the compiled step of {_mesh_text(here.num_devices, here.mesh)}: a "
        "device has another share of the work, so do not compare times",
    )


def _mesh_text(num_devices: int, mesh: Mapping[str, int] | None) -> str:
    sizes = " × ".join(f"{axis}={size}" for axis, size in (mesh or {}).items() if size > 1)
    return f"{num_devices} devices" + (f" ({sizes})" if sizes else "")


def _seconds(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in joined(spans))
