"""Measures the times of a step's instructions, by which XLA:GPU then schedules the step (`schedule.profile_steps`).

A run first trains by estimated times (`step/compile.py`). It compiles the same schedule without CUDA graphs, traces a
few steps of it, and compiles the step by the traced times, all while training continues. Then it times both programs
and continues with the faster one.
"""

import statistics
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Self

import jax
from jax.stages import Compiled

from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.files.atomic import reason
from moe_jax.measure.hlo import parse
from moe_jax.measure.profile import measured_profile, measured_seconds
from moe_jax.measure.trace import TraceError, read_trace
from moe_jax.run.agreed_compile import AgreedCompile, State
from moe_jax.run.kept_profile import FILE, KeptProfile
from moe_jax.run.profiler import start_trace, wait_for_all
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
        self._programs = self._all_programs(program)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._programs.close()

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
            yield chosen

    def _measuring(self, program: StepProgram) -> Generator[Compiled, None, Compiled]:
        """Measure, top to bottom, one yield for each step; returns the program to continue with."""
        without_graphs = yield from self._compiling(program.for_tracing, "a step to trace")
        if without_graphs is None:
            return self._first
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
        return by_profile if self._choose(program, profile, estimated_s, measured_s) else self._first

    def _compiling(self, program: StepProgram, name: str) -> Generator[Compiled, None, Compiled | None]:
        """Compile while training continues; returns None, after a warning, if a process fails."""
        self._log.info(f"step {self._step}: compiling {name} while training continues")
        compiling = AgreedCompile(lambda: compiled(program))
        while True:
            for _ in range(_ROUND):
                yield self._first
            with self._meter.paused():  # processes must not communicate while a step does
                state = compiling.agreed_state()
            if state is State.COMPILED:
                return compiling.result()
            if state is State.FAILED:
                self._warn(f"{name} cannot be compiled, {compiling.reason}")
                return None

    def _tracing(self, program: StepProgram, traced: Compiled) -> Generator[Compiled, None, str | None]:
        """Trace steps on process 0; returns the profile, or None after a warning."""
        count = self._run.config.schedule.profile_steps
        for _ in range(WARMUP_STEPS):
            yield traced
        while any(step in self._busy for step in range(self._step, self._step + count)):
            yield traced
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            with self._meter.paused():
                if is_main_process():
                    start_trace(Path(folder))
                wait_for_all("have started to trace")
            self.is_tracing = True
            try:
                for _ in range(count):
                    yield traced
                self._meter.wait()
            finally:
                self.is_tracing = False
                if is_main_process():
                    jax.profiler.stop_trace()
            with self._meter.paused():
                return from_process(0, self._profile(Path(folder), program, traced) if is_main_process() else None)

    def _profile(self, folder: Path, program: StepProgram, traced: Compiled) -> str | None:
        text = traced.as_text() or ""
        try:
            seconds = measured_seconds(read_trace(folder, text))
        except TraceError as error:
            self._warn(str(error))
            return None
        if not seconds:
            self._warn("jax's profiler saw none of the step's instructions, for which it may lack a permission")
            return None
        has_tasks = self._run.trainer.kind.facts.orders_tasks
        return measured_profile(parse(text), seconds, program.target, program.num_devices, has_tasks)

    def _timing(self, program: Compiled, seconds: list[float]) -> Generator[Compiled, None, None]:
        for number in range(WARMUP_STEPS + _ROUND):
            yield program
            if number > WARMUP_STEPS and self._meter.step_s is not None:  # the time of the step before this one
                seconds.append(self._meter.step_s)

    def _choose(self, program: StepProgram, profile: str, estimated_s: list[float], measured_s: list[float]) -> bool:
        """Whether the program by measured times is faster, as process 0 decides, reports and keeps."""
        if not is_main_process():
            return bool(from_process(0, None))
        estimated, measured = (statistics.median(each or [0.0]) for each in (estimated_s, measured_s))
        is_faster = measured < estimated
        self._log.info(
            f"step {self._step}: {human_seconds(measured)} per step by measured times of instructions, "
            f"{human_seconds(estimated)} by estimated ones: continuing with {'measured' if is_faster else 'estimated'}"
        )
        kept = KeptProfile(program.fingerprint, profile if is_faster else None)
        try:
            kept.write(self._run.folder, {"estimated": estimated, "measured": measured})
        except OSError as error:
            self._log.warn(f"{FILE} cannot be written ({reason(error)}): a later start measures again")
        return bool(from_process(0, is_faster))

    def _warn(self, problem: str) -> None:
        self._log.warn(f"step {self._step}: {problem}: continuing with estimated times of its instructions")
