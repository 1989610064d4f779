"""Estimate what overlaps in a compiled program: replay its scheduled instructions on one compute stream and the links.

A start queues its collective on its links, inside nodes and between them, where transfers run one after another; a done
makes compute wait for it. A collective without start and done also occupies compute. The time that compute waits is
exposed communication, the rest is hidden.

A pipelined step is a loop over ticks, in which each pass is a while-loop with trip count 0 or 1. The timeline is that
of the busiest stage, and each tick takes as long as its slowest stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from moe_jax.measure.costs import (
    FusedPart,
    Link,
    collective_of,
    compute_seconds,
    fused_part,
    link_seconds,
    matrix_products,
    only_overflows,
    sent_bytes,
)
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.targets import Target

Passes = Mapping[str, Sequence[Sequence[int]]]  # by scope of a pass: its trip count, by tick and stage


@dataclass(frozen=True, kw_only=True)
class ComputeInstruction:
    """One instruction on the compute stream."""

    instruction: Instruction
    start_s: float
    end_s: float
    products: int  # matrix products
    op_name: str = ""
    iteration: int = 0  # in the innermost loop around it, which has `iterations`
    iterations: int = 1

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One transfer on the links."""

    instruction: Instruction  # the collective itself
    op_name: str = ""
    is_async: bool
    start_s: float
    end_s: float
    num_bytes: float  # leaving a device
    exposed_s: float = 0.0
    inside_s: float = 0.0  # compute between its start and its done
    inside_products: int = 0
    iteration: int = 0  # as in ComputeInstruction
    iterations: int = 1

    @property
    def kind(self) -> str:
        return self.instruction.opcode.removesuffix("-start")

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Replay:
    """The estimated timeline of a program."""

    compute: tuple[ComputeInstruction, ...]
    collectives: tuple[Collective, ...]  # in order of issue
    step_s: float
    unknown_loops: tuple[str, ...]  # replayed once, since their trip count is unknown
    balanced_loops: tuple[str, ...] = ()  # over the rows that exist: replayed as often as balanced routing needs
    idle_s: float = 0.0  # waiting for other stages
    stage: int = 0  # whose timeline this is

    @cached_property
    def compute_s(self) -> float:
        return sum(task.seconds for task in self.compute)

    @cached_property
    def communication_s(self) -> float:
        return sum(task.seconds for task in self.collectives)

    @cached_property
    def exposed_s(self) -> float:
        return sum(task.exposed_s for task in self.collectives)

    @property
    def hidden_s(self) -> float:
        return self.communication_s - self.exposed_s


@dataclass
class _Replay:
    program: HloModule
    target: Target
    num_devices: int
    now_s: float = 0.0
    link_free_s: dict[Link, float] = field(default_factory=lambda: {"inside": 0.0, "between": 0.0})
    done_products: int = 0
    done_compute_s: float = 0.0
    iteration: int = 0
    iterations: int = 1
    compute: list[ComputeInstruction] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    # start → index of its collective, and compute seconds and products before it
    open: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    # names of loops as keys
    unknown_loops: dict[str, None] = field(default_factory=dict)
    balanced_loops: dict[str, None] = field(default_factory=dict)
    passes: Passes = field(default_factory=dict)
    stage: int = 0
    idle_s: float = 0.0


def replay(program: HloModule, target: Target, num_devices: int, passes: Passes | None = None) -> Replay:
    """Replay a program's schedule on a target. `passes` describes the ticks of a pipelined step."""
    walk = _Replay(program, target, num_devices, passes=passes or {})
    _run(walk, program.computations[program.entry])
    return Replay(
        tuple(walk.compute),
        tuple(walk.collectives),
        walk.now_s,
        tuple(walk.unknown_loops),
        tuple(walk.balanced_loops),
        walk.idle_s,
        walk.stage,
    )


def loop_seconds(loop: Instruction, program: HloModule, target: Target) -> float:
    """Return the seconds of a loop that contains no collective; 0 if its rows only exist when lanes overflow."""
    walk = _Replay(program, target, num_devices=1)
    _loop(walk, loop)
    return walk.now_s


def _run(walk: _Replay, lines: Iterable[Instruction]) -> None:
    for line in lines:
        if line.opcode == "while":
            _loop(walk, line)
        elif line.opcode == "conditional":
            branches = [walk.program.computations[name] for name in line.called]
            _run(walk, min(branches, key=lambda branch: _alone(walk, branch).now_s))
        elif line.opcode == "call":
            _run(walk, walk.program.computations[line.called[0]])
        elif part := fused_part(line, walk.program):
            _fused(walk, line, part)
        elif _is_end(line):
            _finish(walk, line)
        elif (collective := collective_of(line, walk.program)) is not None:
            _communicate(walk, line, collective)
        else:
            _compute(walk, line, compute_seconds(line, walk.program, walk.target))


def _loop(walk: _Replay, line: Instruction) -> None:
    if only_overflows(line, walk.program):
        return
    body = walk.program.computations[line.called[0]]
    if any(_pass_of(walk, inner) for inner in body):
        _ticks(walk, body)
        return
    if name := _pass_of(walk, line):
        if walk.passes[name][walk.iteration][walk.stage]:
            _run(walk, body)
        return
    iterations = _iterations(walk, line)
    if collective_of(line, walk.program) is None:
        alone = _alone(walk, body)
        walk.unknown_loops |= alone.unknown_loops
        walk.balanced_loops |= alone.balanced_loops
        _compute(walk, line, alone.now_s * iterations, round(iterations))
        return
    outer = walk.iteration, walk.iterations
    walk.iterations = round(iterations)
    for iteration in range(walk.iterations):
        walk.iteration = iteration
        _run(walk, body)
    walk.iteration, walk.iterations = outer


def _iterations(walk: _Replay, line: Instruction) -> float:
    known, balanced = walk.program.trip_count(line), walk.program.balanced_trip_count(line)
    if known is not None:
        return known
    if balanced is not None:
        walk.balanced_loops[line.name] = None
        return balanced
    walk.unknown_loops[line.name] = None
    return 1


def _pass_of(walk: _Replay, line: Instruction) -> str | None:
    """Return the scope of the pass that a loop runs, or None if it is not a pass."""
    if line.opcode != "while":
        return None
    *_, around, _ = ["", *line.op_name.split("/")]
    return around if around in walk.passes else None


def _ticks(walk: _Replay, body: Sequence[Instruction]) -> None:
    """Replay the ticks of a pipeline for the busiest stage."""
    # trip counts of all passes, by tick and stage
    table = [list(zip(*rows, strict=True)) for rows in zip(*walk.passes.values(), strict=True)]
    seconds: dict[tuple[int, ...], float] = {}
    for tick, stages in enumerate(table):
        for stage, counts in enumerate(stages):
            if counts not in seconds:
                seconds[counts] = _alone(walk, body, tick, stage).now_s
    busy_s = [sum(seconds[counts] for counts in own) for own in zip(*table, strict=True)]
    walk.stage = busy_s.index(max(busy_s))
    outer = walk.iteration, walk.iterations
    walk.iterations = len(table)
    for walk.iteration, stages in enumerate(table):
        ends_s = walk.now_s + max(seconds[counts] for counts in stages)
        _run(walk, body)
        waits_s = max(ends_s - walk.now_s, 0.0)
        walk.now_s += waits_s
        walk.idle_s += waits_s
    walk.iteration, walk.iterations = outer


def _compute(walk: _Replay, line: Instruction, seconds: float, iterations: int = 1) -> None:
    if seconds == 0.0:
        return
    products = matrix_products(line, walk.program) * iterations
    end_s = walk.now_s + seconds
    walk.compute.append(
        ComputeInstruction(
            instruction=line,
            op_name=walk.program.op_name(line),
            start_s=walk.now_s,
            end_s=end_s,
            products=products,
            iteration=walk.iteration,
            iterations=walk.iterations,
        )
    )
    walk.now_s = end_s
    walk.done_compute_s += seconds
    walk.done_products += products


def _fused(walk: _Replay, line: Instruction, part: FusedPart) -> None:
    collective = collective_of(line, walk.program)
    assert collective is not None, "each part contains it"
    if part == "start":
        _communicate(walk, line, collective, collective.chain)
    elif part == "done" and collective.chain in walk.open:
        _wait(walk, walk.open.pop(collective.chain))
    else:
        _compute(walk, line, compute_seconds(line, walk.program, walk.target))


def _communicate(walk: _Replay, line: Instruction, collective: Instruction, chain: str | None = None) -> None:
    """Issue a collective. With a chain it is asynchronous, and the chain is its key in `walk.open`."""
    seconds = link_seconds(collective, walk.program, walk.target, walk.num_devices)
    # XLA:GPU also writes start and done for synchronous collectives
    is_async = chain is not None or (line.opcode.endswith("-start") and '"is_sync":true' not in line.attributes)
    start_s = max([walk.now_s, *(walk.link_free_s[link] for link in seconds)])
    walk.link_free_s |= {link: start_s + each for link, each in seconds.items()}
    task = Collective(
        instruction=collective,
        op_name=walk.program.op_name(collective) or walk.program.op_name(line),
        is_async=is_async,
        start_s=start_s,
        end_s=start_s + max(seconds.values(), default=0.0),
        num_bytes=sent_bytes(collective, walk.program, walk.num_devices),
        iteration=walk.iteration,
        iterations=walk.iterations,
    )
    if is_async:
        walk.open[chain or line.name] = len(walk.collectives), walk.done_compute_s, walk.done_products
    else:
        task = replace(task, exposed_s=task.end_s - walk.now_s)
        walk.now_s = task.end_s
    walk.collectives.append(task)


def _is_end(line: Instruction) -> bool:
    return line.opcode.endswith(("-done", "-update"))


def _finish(walk: _Replay, line: Instruction) -> None:
    started = walk.open.pop(line.operands[0], None)
    if started is None:  # the end of a copy
        return
    if line.opcode.endswith("-update"):
        walk.open[line.name] = started
        return
    _wait(walk, started)


def _wait(walk: _Replay, started: tuple[int, float, int]) -> None:
    """Let compute wait for a collective, an entry of `walk.open`."""
    index, compute_before_s, products_before = started
    task = walk.collectives[index]
    wait_s = max(task.end_s - walk.now_s, 0.0)
    walk.collectives[index] = replace(
        task,
        exposed_s=wait_s,
        inside_s=walk.done_compute_s - compute_before_s,
        inside_products=walk.done_products - products_before,
    )
    walk.now_s += wait_s


def _alone(walk: _Replay, lines: Iterable[Instruction], tick: int = 0, stage: int = 0) -> _Replay:
    """Return the replay of a computation by itself."""
    inner = _Replay(walk.program, walk.target, walk.num_devices, passes=walk.passes, iteration=tick, stage=stage)
    _run(inner, lines)
    return inner
