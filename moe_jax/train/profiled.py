"""One step of a run under jax's profiler: `report --compile … --trace` draws it beside what was predicted."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import multihost_utils
from jax.stages import Compiled

from moe_jax.config import Config
from moe_jax.measure.trace import FOLDER, PROGRAM
from moe_jax.train.meter import Metrics
from moe_jax.train.step import State


def step_to_trace(config: Config, first_step: int) -> int | None:
    """The step of `log.trace_step`, or the next if that is the first of this process, which includes its start-up.

    None where it was done before this start, or none is left.
    """
    wanted = config.log.trace_step
    if wanted is None or wanted <= first_step:
        return None
    step = max(wanted, first_step + 2)
    return step if step <= config.train.steps else None


def traced(program: Compiled, state: State, inputs: Sequence[jax.Array], run_folder: Path) -> tuple[State, Metrics]:
    """Run one step alone; leaves its trace and its program's HLO text in RUN/trace/PROCESS, whole or not at all."""
    folder = run_folder / FOLDER / str(jax.process_index())
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    try:
        with jax.profiler.trace(part, profiler_options=options):
            _wait_for_all("have started to trace")
            result: tuple[State, Metrics] = jax.block_until_ready(program(state, *inputs))
        (part / PROGRAM).write_text(program.as_text() or "", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _wait_for_all("have written")  # or the next step would count as long as the slowest of them takes
    return result


def _wait_for_all(processes: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(processes)
