"""Measures the times of a step's instructions, by which XLA:GPU then schedules the step (`schedule.profile_steps`).

A run first trains by estimated times (`step/compile.py`). It compiles the same schedule without CUDA graphs, traces a
few steps of it, and compiles the step by the traced times, all while training continues. Then it times both programs
and continues with the faster one. Whatever fails, the run continues by estimated times, after a warning.
"""

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Self

import jax
from jax.stages import Compiled

from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import first_line
from moe_jax.files.atomic import reason
from moe_jax.measure.hlo import parse
from moe_jax.measure.profile import measured_profile, measured_seconds
from moe_jax.measure.temporaries import allocated_bytes
from moe_jax.measure.trace import TracedOperation, read_trace
from moe_jax.plan.units import size
from moe_jax.run.agreed_compile import AgreedCompile, State
from moe_jax.run.kept_profile import FILE, KeptProfile, Measuring, step_key
from moe_jax.run.profiler import start_trace, stop_trace
from moe_jax.run.setup import Run
from moe_jax.run.tuning import WARMUP_STEPS
from moe_jax.step.compile import StepProgram
from moe_jax.step.compile_cache import compiled
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog, human_seconds

_ROUND = 10  # steps between two checks of a compilation, and timed steps of a program
_ROUNDS = 2  # of each program, in turns


class ProfileGuided:
    """Context manager that names the program of each step while it measures.

    `program` is what `first`, the program in use, was compiled from; None: nothing is measured. No step in `busy` is
    traced or gets another program than the step before it.
    """

    def __init__(
        self, run: Run, program: StepProgram | None, first: Compiled, meter: Meter, log: RunLog, busy: range = range(0)
    ):
        self.is_tracing = False  # whether the step whose program was named last is traced
        self._run, self._first, self._meter, self._log, self._busy = run, first, meter, log, busy
        self._step = run.first_step
        self._is_measuring = program is not None
        self._left: Measuring | None = None  # in the run's folder
        self._programs = self._all_programs(program)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._programs.close()
        if error is None or not issubclass(error, Exception):  # not by a program that failed
            self._forget()

    def program_of(self, step: int) -> Compiled | None:
        """The program of a step; None for the one in use. All processes call it before every step."""
        if step in self._busy:
            return None
        self._step = step
        return next(self._programs, None)

    def finish(self) -> None:
        """Report it if the run ends before everything is measured."""
        if self._is_measuring:
            self._log.info("schedule.profile_steps: the run ends before its step is measured, which takes more steps")

    def _all_programs(self, program: StepProgram | None) -> Generator[Compiled, None, None]:
        if program is not None:
            chosen = yield from self._measuring(program)
            self._is_measuring = False
            self._forget()
            yield chosen

    def _measuring(self, program: StepProgram) -> Generator[Compiled, None, Compiled]:
        """Measure, top to bottom, one yield for each step; returns the program to continue with."""
        without_graphs = yield from self._compiling(program.for_tracing, "a step to trace")
        if without_graphs is None:
            return self._first
        self._remember(program)
        profile = yield from self._tracing(program, without_graphs)
        if profile is None:
            return self._first
        by_profile = yield from self._compiling(program.with_measured(profile), "the step by measured times")
        if by_profile is None:
            return self._first
        estimated_s, measured_s = list[float](), list[float]()
        for _ in range(_ROUNDS):
            yield from self._timing(by_profile, measured_s)
            yield from self._timing(self._first, estimated_s)
        with self._meter.paused():
            is_faster = from_process(0, self._choose(program, profile, estimated_s, measured_s))
        return by_profile if is_faster else self._first

    def _remember(self, program: StepProgram) -> None:
        """Leave in the folder that the run measures, in case a program that it tries ends it."""
        try:
            self._left = Measuring(self._run.folder, step_key(program)) if is_main_process() else None
        except OSError as error:
            self._log.warn(f"{FILE} cannot be written ({reason(error)}): a start after a crash measures again")

    def _forget(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # somebody may have changed the file
            if self._left is not None:
                self._left.finish()
        self._left = None

    def _compiling(self, program: StepProgram, name: str) -> Generator[Compiled, None, Compiled | None]:
        """Compile while training continues; returns None, after a warning, if a process fails or it needs too much
        memory.
        """
        self._log.info(f"step {self._step}: compiling {name} while training continues")
        compiling = AgreedCompile(lambda: compiled(program))
        while True:
            for _ in range(_ROUND):
                yield self._first
            with self._meter.paused():  # processes must not communicate while a step does
                state = compiling.agreed_state()
                problem = ""
                if state is State.COMPILED:
                    problem = from_process(0, _memory_problem(compiling.result(), self._first))
            if state is State.FAILED:
                problem = f"cannot be compiled, {compiling.reason}"
            if problem:
                self._warn(f"{name} {problem}")
                return None
            if state is State.COMPILED:
                return compiling.result()

    def _tracing(self, program: StepProgram, traced: Compiled) -> Generator[Compiled, None, str | None]:
        """Trace steps on process 0; returns the profile, or None after a warning."""
        count, trace = self._run.config.schedule.profile_steps, _Trace()
        while any(step in self._busy for step in range(self._step, self._step + WARMUP_STEPS + count + 1)):
            yield self._first
        for _ in range(WARMUP_STEPS):
            yield traced
        try:
            with self._meter.paused():
                problem = from_process(0, trace.start() if is_main_process() else "")
            if not problem:
                self.is_tracing = True
                for _ in range(count):
                    yield traced
                self.is_tracing = False
            with self._meter.paused():
                found = self._profile(trace, program, traced) if is_main_process() and not problem else ("", problem)
                profile, problem = from_process(0, found)
        finally:
            self.is_tracing = False
            trace.drop()
        if problem:
            self._warn(problem)
            return None
        return str(profile)

    def _profile(self, trace: "_Trace", program: StepProgram, traced: Compiled) -> tuple[str, str]:
        """The profile, or a problem."""
        text, steps = traced.as_text() or "", self._run.config.schedule.profile_steps
        try:
            module = parse(text)
            seconds = measured_seconds(module, trace.operations(text), steps)
        except Exception as error:  # a profiler that cannot write or a trace that cannot be read raises anything
            return "", f"the trace of its instructions failed, {first_line(error)}"
        if not seconds:
            return "", "jax's profiler saw none of the step's instructions, for which it may lack a permission"
        has_tasks = self._run.trainer.kind.facts.orders_tasks
        return measured_profile(module, seconds, program.target, program.num_devices, has_tasks), ""

    def _timing(self, program: Compiled, seconds: list[float]) -> Generator[Compiled, None, None]:
        for number in range(WARMUP_STEPS + _ROUND + 1):
            yield program
            if number > WARMUP_STEPS and self._meter.step_s is not None:  # the time of the step before this one
                seconds.append(self._meter.step_s)

    def _choose(
        self, program: StepProgram, profile: str, estimated_s: Sequence[float], measured_s: Sequence[float]
    ) -> bool:
        """Whether the program by measured times is faster, which process 0 reports and keeps."""
        if not is_main_process():
            return False
        if not (estimated_s and measured_s):
            self._warn("too few of its steps could be timed")
            return False
        estimated, measured = statistics.median(estimated_s), statistics.median(measured_s)
        is_faster = measured < estimated
        self._log.info(
            f"step {self._step}: {human_seconds(measured)} per step by measured times of instructions, "
            f"{human_seconds(estimated)} by estimated ones: continuing with {'measured' if is_faster else 'estimated'}"
        )
        kept = KeptProfile(step_key(program), profile if is_faster else None)
        try:
            kept.write(self._run.folder, {"estimated": estimated, "measured": measured})
        except OSError as error:
            self._log.warn(f"{FILE} cannot be written ({reason(error)}): a later start measures again")
        return is_faster

    def _warn(self, problem: str) -> None:
        self._log.warn(f"step {self._step}: {problem}: continuing with estimated times of its instructions")


class _Trace:
    """A trace of this process in a temporary folder."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_on = False

    def start(self) -> str:
        """Start the profiler; returns what went wrong."""
        try:
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            start_trace(Path(self._folder.name))
        except Exception as error:  # no folder, or another trace
            return f"its instructions cannot be traced, {first_line(error)}"
        self._is_on = True
        return ""

    def operations(self, program: str) -> list[TracedOperation]:
        """Stop the profiler and return what it has seen. Raises anything."""
        assert self._folder is not None
        self._is_on = False
        stop_trace()
        return read_trace(Path(self._folder.name), program)

    def drop(self) -> None:
        """Stop the profiler, if it is on, and remove what it has written."""
        if self._is_on:
            self._is_on = False
            try:
                stop_trace()
            except Exception as error:
                print(f"warning: a trace cannot be written, {first_line(error)}", file=sys.stderr, flush=True)
        if self._folder is not None:
            self._folder.cleanup()


def _memory_problem(program: Compiled, first: Compiled) -> str:
    """Whether a program needs more memory than the one in use and than the device has, in words."""
    needed, before = map(allocated_bytes, (program, first))
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", before)
    return f"needs {size(needed)} per device of {size(limit)}" if needed > max(before, limit) else ""
