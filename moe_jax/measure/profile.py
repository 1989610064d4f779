"""Write estimated or measured instruction times as a profile (fdo_profile), with which XLA:GPU's scheduler compiles a
program again.

Without a profile the scheduler treats all fusions as equally long, and assumes that five of any size hide any
collective.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from moe_jax.measure.costs import collective_of, collective_seconds, compute_seconds
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.overlap import loop_seconds
from moe_jax.measure.targets import Target
from moe_jax.measure.tasks import action_of
from moe_jax.measure.trace import TracedOperation, first_device

_PROFILE = re.compile(r'(costs \{ name: "[^"\\\n]*" cost_us: \d+\.\d+ \}\n)*')
_NAME = re.compile(r'scheduling_name="([^"]*)"')


def estimated_profile(program: HloModule, target: Target, num_devices: int) -> str:
    """Return a ProfiledInstructionsProto as text: microseconds of each instruction, by the name it is scheduled under.

    Compute outside the tasks of a schedule counts as 0. It would hide collectives anywhere, so it should not replace a
    task that runs concurrently with one. A loop inside a task, as over the rows of an expert, has the time of all its
    iterations.
    """
    return _profile(program, lambda line: _seconds(line, program, target, num_devices))


def measured_profile(
    program: HloModule, seconds: Mapping[str, float], target: Target | None, num_devices: int, has_tasks: bool
) -> str:
    """Return the same profile with measured `seconds` by the names of instructions (`measured_seconds`).

    An instruction that was not measured has its estimated time, or without a `target` none at all. Compute outside the
    tasks of a schedule counts as 0, unless the program has no tasks (`has_tasks`).
    """

    def seconds_of(line: Instruction) -> float | None:
        if _is_hidden(line, program, has_tasks):
            return 0.0
        if line.name in seconds:
            return seconds[line.name]
        return None if target is None else _seconds(line, program, target, num_devices)

    return _profile(program, seconds_of)


def measured_seconds(program: HloModule, operations: Sequence[TracedOperation], steps: int) -> dict[str, float]:
    """Return the seconds of one run of each instruction in a trace of some steps, on its first device.

    Compute has the median of its runs. A collective has the shortest, which includes the least waiting for other
    devices. An instruction may launch several kernels, each of which is an operation of the trace: those of one run are
    added up. In loops with an unknown number of iterations each counts as a run.
    """
    device = first_device(operations) if operations else ""
    spans: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for each in sorted(operations, key=lambda operation: operation.start_s):
        if each.device == device:
            spans[each.name, each.communicates].append(each.end_s - each.start_s)
    runs_of = dict(_runs_in_step(program, program.computations[program.entry], 1))

    def of_runs(name: str, found: list[float]) -> list[float]:
        runs = steps * (runs_of.get(name) or 0)
        if runs == 0 or len(found) % runs:
            return found
        kernels = len(found) // runs
        return [sum(found[i : i + kernels]) for i in range(0, len(found), kernels)]

    return {
        name: min(of_runs(name, found)) if communicates else statistics.median(of_runs(name, found))
        for (name, communicates), found in spans.items()
    }


def _runs_in_step(
    program: HloModule, lines: Iterable[Instruction], runs: int | None
) -> Iterator[tuple[str, int | None]]:
    """Yield how often each instruction, also inside of loops, runs in a step; None: unknown."""
    for line in lines:
        yield line.name, runs
        trips = program.trip_count(line) if line.opcode == "while" else 1
        inside = None if runs is None or trips is None else runs * trips
        for name in line.called:
            yield from _runs_in_step(program, program.computations[name], inside)


def is_profile(text: str) -> bool:
    """Return whether a text has the form of these profiles."""
    return _PROFILE.fullmatch(text) is not None


def _profile(program: HloModule, seconds: Callable[[Instruction], float | None]) -> str:
    fused = {name for line in program.by_name.values() if line.opcode == "fusion" for name in line.called}
    lines = [line for name, lines in program.computations.items() if name not in fused for line in lines]
    times = ((_scheduled_name(line), seconds(line)) for line in lines)
    return "".join(
        f'costs {{ name: "{name}" cost_us: {1e6 * each:.3f} }}\n' for name, each in times if each is not None
    )


def _scheduled_name(line: Instruction) -> str:
    """Return the name an instruction is scheduled under; later passes may rename it."""
    found = _NAME.search(line.attributes)
    return found[1] if found else line.name


def _is_hidden(line: Instruction, program: HloModule, has_tasks: bool) -> bool:
    """Whether an instruction counts as 0: it has no time of its own, or is compute outside a program's tasks."""
    communicates = collective_of(line, program) is not None
    if line.opcode in ("conditional", "call") or line.opcode.endswith(("-done", "-update")):
        return True
    if line.opcode == "while" and communicates:
        return True
    return has_tasks and not communicates and action_of(program.op_name(line)) is None


def _seconds(line: Instruction, program: HloModule, target: Target, num_devices: int) -> float:
    if _is_hidden(line, program, has_tasks=True):
        return 0.0
    if line.opcode == "while":
        return loop_seconds(line, program, target)
    collective = collective_of(line, program)
    if collective is not None:
        return collective_seconds(collective, program, target, num_devices)
    return compute_seconds(line, program, target)
