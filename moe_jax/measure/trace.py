"""Read a trace of jax.profiler: operations with their tasks, devices, threads and times."""

import gzip
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.errors import UserError
from moe_jax.files.untrusted import check_regular, parse_json
from moe_jax.measure.costs import collective_of
from moe_jax.measure.hlo import HloModule, Instruction, parse
from moe_jax.measure.tasks import action_of, iteration_names
from moe_jax.parallel.trace_names import ARRIVING, FINISH_SCOPE, START_SCOPE, STARTED
from moe_jax.schedule.schedule import Schedule

FOLDER, PROGRAM = "trace", "step.hlo"  # in the folder of a run: the trace of a step, and its program
FILES = "*.trace.json.gz"
MOST_BYTES = 2**30  # limit for a program's text and for an unpacked trace file
# scopes of a step without tasks: parts of the model, and of the update
_PARTS = ("embed", "attend", "mlp", "route", "dispatch", "experts", "combine", "unpermute", "head")
_PART = re.compile(rf"[/(]({'|'.join((*_PARTS, 'optimizer', 'grad_reduce', 'grad_norm'))})[/)]")
Event = dict[str, Any]  # in Chrome's trace format


class TraceError(UserError):
    """The trace is unreadable, or belongs to another program."""


class TracedOperation(NamedTuple):
    """One run of one HLO instruction."""

    name: str
    task: str  # an action, e.g. F.expert.3.0; in a plain step F or B; "" outside of these
    communicates: bool
    thread: str
    start_s: float  # since the first operation
    end_s: float
    device: str = ""
    run: int = 0  # number of the run of this instruction on this device
    part: str = ""  # of the model or step, e.g. experts, by the scopes that a step without tasks has


def read_trace(folder: Path, program: str) -> list[TracedOperation]:
    """Return the operations in a folder that `jax.profiler.trace` wrote, ordered by start. `program` is the HLO text
    that ran.

    A loop or call is listed in addition to the operations inside it. Raises TraceError or HloError.
    """
    events = [event for path in sorted(folder.rglob(FILES)) for event in _events(path)]
    if not events:
        return []
    hlo = parse(program)
    named = {(e["pid"], e.get("tid"), e["name"]): e["args"].get("name") for e in events if e.get("ph") == "M"}
    events = [*events, *_of_tpus(hlo, events, named)]
    spans = sorted((e for e in events if _is_run_of(hlo, e)), key=lambda event: event["ts"])
    runs: Counter[tuple[str, str]] = Counter()
    for event in spans:
        name = event["args"]["hlo_op"]
        device = event["args"].get("device_ordinal") or named.get((event["pid"], None, "process_name"), "")
        event["args"] |= {"line": hlo.by_name.get(name), "device": device, "run": runs[device, name]}
        runs[device, name] += 1
    first = min((event["ts"] for event in spans), default=0)
    operations = [
        TracedOperation(
            name=event["args"]["hlo_op"],
            task=_task(line, hlo) if line else "",
            part=_part(line, hlo) if line else "",
            communicates=event["name"] == ARRIVING or (line is not None and _communicates(line, hlo)),
            thread=named.get((event["pid"], event["tid"], "thread_name"), str(event["tid"])),
            start_s=(event["ts"] - first) * 1e-6,
            end_s=(event["ts"] + event["dur"] - first) * 1e-6,
            device=event["args"]["device"],
            run=event["args"]["run"],
        )
        for event in [*spans, *_in_background(events, spans)]
        if not _calls(line := event["args"]["line"], FINISH_SCOPE)  # these only wait
    ]
    return sorted(operations, key=lambda operation: operation.start_s)


def first_device(operations: Sequence[TracedOperation]) -> str:
    """Return the name of the first device that ran any of the operations."""
    return min({operation.device for operation in operations}, key=lambda name: (len(name), name))


def of_one_device(
    operations: Sequence[TracedOperation], program: HloModule, schedule: Schedule | None
) -> list[TracedOperation]:
    """Return the operations of the first device, without loops and calls; tasks in loops over blocks get the schedule's
    names. A plain step has none.
    """
    device = first_device(operations)
    lines = program.by_name
    own = [operation for operation in operations if operation.device == device]
    own = [each for each in own if not (each.name in lines and lines[each.name].is_control)]
    if schedule is None:
        return own
    iterations_of = dict(_loop_iterations(program, program.computations[program.entry], ()))
    inside = (action_of(operation.task) for operation in own if iterations_of.get(operation.name))
    name_of = iteration_names(schedule, filter(None, inside))
    runs = {operation.name: operation.run + 1 for operation in sorted(own, key=lambda operation: operation.run)}

    def rename(operation: TracedOperation) -> TracedOperation:
        iterations, action = iterations_of.get(operation.name), action_of(operation.task)
        if not iterations or 0 in iterations or action is None:
            return operation
        iteration = operation.run * math.prod(iterations) // runs[operation.name] % iterations[-1]
        return operation._replace(task=str(name_of(action, iteration, iterations[-1]) or action))

    return list(map(rename, own))


def seconds_by_op(operations: Iterable[TracedOperation], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the compute time of tasks, summed by op and by direction (F, B, W), e.g. `["expert"]["W"]`.

    `kinds` are those of the model's blocks; "dense" is the only compute op of a dense block. The step must have tasks
    for weight gradients (`schedule.weight_grad=greedy`), and the process one device: concurrent operations of a task
    count once.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for operation in operations:
        if operation.task and not operation.communicates:
            spans[operation.task].append((operation.start_s, operation.end_s))
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys("FBW", 0.0))
    for task, parts in spans.items():
        action = action_of(task)  # None in a plain step
        if action is not None and action.direction in "FBW":
            dense = action.op == "attend" and kinds[action.block] == "dense"
            op = "dense" if dense else action.op
            seconds[op][action.direction] += sum(end - start for start, end in joined(parts))
    return dict(seconds)


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans ordered by start, with overlapping or adjacent ones merged."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _events(path: Path) -> list[Event]:
    try:
        check_regular(path)
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        return [dict(event) for event in parse_json(content)["traceEvents"]]
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace of jax.profiler ({error}): trace the program again") from None


def _is_run_of(program: HloModule, event: Event) -> bool:
    arguments = event.get("args", {})
    return "dur" in event and "hlo_op" in arguments and arguments.get("hlo_module") == program.name


def _of_tpus(
    program: HloModule, events: Sequence[Event], named: Mapping[tuple[int, int | None, str], str]
) -> Iterator[Event]:
    """Yield the operations of TPUs as other platforms list them: there, one thread has the names of instructions, and
    another one the programs that ran meanwhile.
    """
    devices = {
        pid: name for (pid, _, kind), name in named.items() if kind == "process_name" and "/device:TPU" in str(name)
    }
    of_thread: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if "dur" in event and event["pid"] in devices:
            of_thread[event["pid"], named.get((event["pid"], event.get("tid"), "thread_name"), "")].append(event)
    for pid, device in devices.items():
        ran = [each for each in of_thread[pid, "XLA Modules"] if each["name"].startswith(f"{program.name}(")]
        spans = joined((each["ts"], each["ts"] + each["dur"]) for each in ran)
        for event in of_thread[pid, "XLA Ops"]:
            if event["name"] in program.by_name and any(start <= event["ts"] < end for start, end in spans):
                found = {"hlo_op": event["name"], "hlo_module": program.name, "device_ordinal": device}
                yield event | {"args": found}


def _in_background(events: Iterable[Event], spans: Iterable[Event]) -> Iterator[Event]:
    """Yield background collectives. They have no instruction of their own and are assigned to the one that started
    them.
    """
    starts = [event for event in spans if _calls(event["args"]["line"], START_SCOPE)]
    started = sorted((event for event in events if event.get("name") == STARTED), key=lambda event: event["ts"])
    issues = {event["args"]["collective"]: issue for event, issue in zip(started, starts, strict=True)}
    for event in events:
        if event.get("name") == ARRIVING and "dur" in event:
            yield event | {"args": issues[event["args"]["collective"]]["args"]}


def _calls(line: Instruction | None, scope: str) -> bool:
    return line is not None and line.opcode == "custom-call" and scope in line.op_name


def _communicates(line: Instruction, program: HloModule) -> bool:
    return not line.is_control and collective_of(line, program) is not None


def _task(line: Instruction, program: HloModule) -> str:
    stack = line.op_name if line.is_control else program.op_name(line)
    if action := action_of(stack):
        return str(action)
    return "B" if "transpose(" in stack else "F" if "jvp(" in stack else ""


def _part(line: Instruction, program: HloModule) -> str:
    found = _PART.search(line.op_name if line.is_control else program.op_name(line))
    return found[1] if found else ""


def _loop_iterations(
    program: HloModule, lines: Iterable[Instruction], around: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield, for each instruction in `lines` and recursively inside, the trip counts of the enclosing loops over
    several tasks, outermost first. Loops with an unknown number of iterations are left out: their tasks keep the names
    that they have in the program.
    """
    for line in lines:
        yield line.name, around
        iterations = program.trip_count(line) if _is_loop_over_tasks(line, program) else None
        within = around if iterations is None else (*around, iterations)
        for name in line.called:
            yield from _loop_iterations(program, program.computations[name], within)


def _is_loop_over_tasks(line: Instruction, program: HloModule) -> bool:
    if line.opcode != "while":
        return False
    return len({action_of(each.op_name) for each in program.inside(line)} - {None}) > 1
