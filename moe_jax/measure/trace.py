"""What ran when on a CPU, read from a trace of jax.profiler: operations with their threads and times."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.measure.tasks import action_of
from moe_jax.parallel.background import FINISH_SCOPE, START_NAME, START_SCOPE
from moe_jax.parallel.post import TRACE_NAME

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)")  # a definition in HLO text
_COLLECTIVE = re.compile(r" (all-to-all|all-reduce|reduce-scatter|all-gather|collective-permute)\(")
_NAME_STACK = re.compile(r"op_name=\"([^\"]*)")


class Operation(NamedTuple):
    """One run of one HLO instruction."""

    name: str
    task: str  # of the schedule, e.g. F.expert.3.0; where autodiff chose the order: F, B; "" outside
    communicates: bool
    thread: str
    start_s: float  # since the first operation
    end_s: float


def read_trace(folder: Path, program: str) -> list[Operation]:
    """The operations below a folder that `jax.profiler.trace` wrote, by start. `program` is the HLO text that ran.

    A loop or call appears beside the operations inside it.
    """
    definitions = {match[1]: match[2] for match in map(_INSTRUCTION.match, program.splitlines()) if match}
    threads: dict[tuple[int, int], str] = {}
    spans: list[Any] = []
    started: list[Any] = []
    background: list[Any] = []
    for path in sorted(folder.rglob("*.trace.json.gz")):
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        threads |= {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        spans += [e for e in events if "hlo_op" in e.get("args", {}) and "dur" in e]
        started += [e for e in events if e.get("name") == START_NAME]
        background += [e for e in events if e.get("name") == TRACE_NAME and "dur" in e]
    start = min((e["ts"] for e in spans), default=0)
    spans.sort(key=lambda event: event["ts"])
    starts = [e for e in spans if _calls(definitions.get(e["args"]["hlo_op"], ""), START_SCOPE)]
    # collectives in the background have no instruction of their own: they belong to the ones that started them
    started.sort(key=lambda event: event["ts"])
    issues = {event["args"]["collective"]: issue for event, issue in zip(started, starts, strict=True)}
    for event in background:
        event["args"] = issues[event["args"]["collective"]]["args"]
    operations = []
    for event in spans + background:
        name = event["args"]["hlo_op"]
        definition = definitions.get(name, "")
        if _calls(definition, FINISH_SCOPE):  # only waits
            continue
        operations.append(
            Operation(
                name=name,
                task=_task(definition),
                communicates=event["name"] == TRACE_NAME or _COLLECTIVE.search(definition) is not None,
                thread=threads.get((event["pid"], event["tid"]), str(event["tid"])),
                start_s=(event["ts"] - start) * 1e-6,
                end_s=(event["ts"] + event["dur"] - start) * 1e-6,
            )
        )
    return sorted(operations, key=lambda operation: operation.start_s)


def seconds_by_op(operations: Iterable[Operation], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """How long tasks computed, summed by op and by direction (F, B, W), e.g. `["expert"]["W"]`.

    `kinds` are those of the model's blocks; "dense" is the one compute op of a dense block. The step is to have tasks
    for weight gradients (`schedule.weight_grad=greedy`), and its process one device: what operations of a task did at
    the same time counts once.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for operation in operations:
        if operation.task and not operation.communicates:
            spans[operation.task].append((operation.start_s, operation.end_s))
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys("FBW", 0.0))
    for task, parts in spans.items():
        action = action_of(task)  # None where autodiff chose the order
        if action is not None and action.direction in "FBW":
            dense = action.op == "attend" and kinds[action.block] == "dense"
            op = "dense" if dense else action.op
            seconds[op][action.direction] += sum(end - start for start, end in joined(parts))
    return dict(seconds)


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans by start, those that touch made one."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _calls(definition: str, scope: str) -> bool:
    return " custom-call(" in definition and scope in definition


def _task(definition: str) -> str:
    stack = _NAME_STACK.search(definition)
    if stack is None:
        return ""
    if action := action_of(stack[1]):
        return str(action)
    return "B" if "transpose(" in stack[1] else "F" if "jvp(" in stack[1] else ""
