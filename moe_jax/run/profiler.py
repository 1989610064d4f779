"""Traces of some steps of a run by jax's profiler, for TensorBoard and xprof.

`report --compile … --trace` draws the trace of one step next to its predicted timeline.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self, final

import jax
from jax._src import profiler as jax_profiler  # a session that cannot be written has no public way to end
from jax.experimental import multihost_utils
from jax.stages import Compiled

from moe_jax.config import Config
from moe_jax.errors import first_line
from moe_jax.measure.trace import FOLDER, PROGRAM
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog


def steps_to_trace(config: Config, first_step: int) -> range:
    """The steps of `log.trace_step`, or as many later ones if they include this process's first step.

    The first step of a process is not traced, as it includes start-up. Empty if the steps were done before this start,
    or if none is left.
    """
    wanted = config.log.trace_step
    if wanted is None or wanted[-1] <= first_step:
        return range(0)
    first = max(wanted[0], first_step + 2)
    return range(first, min(first + wanted[-1] - wanted[0], config.train.steps) + 1)


@final
class Tracing:
    """Context manager that writes the trace of some steps, and their program's HLO text, into RUN/trace/PROCESS.

    An incomplete trace, after an error or the end of the run, is removed. One that cannot be written is reported, and
    the run continues.
    """

    def __init__(self, steps: range, run_folder: Path, log: RunLog):
        self.steps, self._log = steps, log
        self._folder = run_folder / FOLDER / str(jax.process_index())
        self._part = self._folder.with_name(f"{self._folder.name}.part")
        self._is_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            with suppress(Exception):  # it is incomplete
                stop_trace()
        shutil.rmtree(self._part, ignore_errors=True)

    def begin(self, step: int, meter: Meter) -> None:
        """Start tracing, on idle devices, if this is the first of the steps."""
        if not self.steps or step != self.steps[0]:
            return
        with meter.paused():
            try:
                shutil.rmtree(self._part, ignore_errors=True)
                self._part.mkdir(parents=True)
                start_trace(self._part)
                self._is_on = True
            except Exception as error:  # of the profiler, too
                self._warn(error)
            wait_for_all("have started to trace")

    def end(self, step: int, program: Compiled, meter: Meter) -> None:
        """Stop tracing and write the trace, if this was the last of the steps."""
        if not self.steps or step != self.steps[-1]:
            return
        with meter.paused():  # which waits for the step
            if self._is_on:
                self._is_on = False
                try:
                    self._write(program)
                except Exception as error:
                    self._warn(error)
            wait_for_all("have written")  # else the time of the next step would include the slowest writer

    def _write(self, program: Compiled) -> None:
        stop_trace()
        (self._part / PROGRAM).write_text(program.as_text() or "", encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._part.rename(self._folder)

    def _warn(self, error: Exception) -> None:
        """Say that there is no trace, and remove what there is of it, perhaps for room on a full disk."""
        shutil.rmtree(self._part, ignore_errors=True)
        self._log.warn(f"the trace of log.trace_step cannot be written to {self._folder} ({first_line(error)})")


def start_trace(folder: Path) -> None:
    """Start jax's profiler, without the functions of Python."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)


def stop_trace() -> None:
    """Stop jax's profiler and write the trace. The profiler is off even if that raises an error."""
    try:
        jax.profiler.stop_trace()
    except Exception:
        with suppress(AttributeError):
            jax_profiler._profile_state.reset()
        raise


def wait_for_all(processes: str) -> None:
    """Wait until all processes have come here; `processes` says what they have done, for jax's error."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(processes)
