"""Tuning during training: a run tries several programs of its step, and then uses the fastest."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from moe_jax.config import TuneConfig
from moe_jax.config.yaml_io import to_yaml
from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.errors import ConfigError, UserError
from moe_jax.files.atomic import write_atomically
from moe_jax.plan.tuner import Tuner
from moe_jax.run.agreed_compile import AgreedCompile, State
from moe_jax.run.setup import Run
from moe_jax.run.tuning_space import Choices
from moe_jax.step.compile import step_program
from moe_jax.step.compile_cache import compiled
from moe_jax.step.trainer import make_trainer
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog, human_seconds

WARMUP_STEPS = 3  # at the start of a round; not timed, since a new program is slow at first


class Tuning:
    """Names the program of the training step that a run uses next. Without `tune.over` it is always the first one.

    Steps are counted in rounds, which have the same length on all processes. At the end of each round, process 0
    decides which program to use next. `search_state` is the property of this name from the run that is resumed.
    """

    def __init__(
        self, run: Run, first: Compiled, meter: Meter, log: RunLog, search_state: Mapping[str, Any] | None = None
    ):
        self._run, self._meter, self._log = run, meter, log
        self._compiling: AgreedCompile | None = None
        self._steps, self._seconds = 0, list[float]()  # of this round
        if run.choices is not None:
            self._choices, self._wanted = run.choices, run.choices.first
            self._programs = {run.choices.first: first}
            self._searching = run.choices.best_s is None
            self._decider = _Decider(run.choices, run.config.tune, run.folder, log)
            if search_state and self._searching and search_state["choices"] == _plain(run.choices):
                self._switch_to(run.first_step, self._decider.resume(search_state["search"]))

    @property
    def search_state(self) -> dict[str, Any] | None:
        """The unfinished search of process 0 as plain values, for a checkpoint; None if there is no search."""
        if self._run.choices is None or not self._searching:
            return None
        return {"choices": _plain(self._run.choices), "search": self._decider.search_state}

    def after_step(self, step: int) -> Compiled | None:
        """Count a step that was started; return the program of the next steps, or None for the one in use. All
        processes call it after every step.

        Programs change at the end of a round, which is the same step on all processes. Steps during a compilation are
        not timed.
        """
        if self._run.choices is None:
            return None
        self._steps += 1
        seconds, tune = self._meter.step_s, self._run.config.tune
        if self._compiling is None and self._steps > WARMUP_STEPS and seconds is not None:
            self._seconds.append(seconds)
        length = tune.iterations if self._searching else tune.patience
        if self._steps < WARMUP_STEPS + length:
            return None
        measured, self._steps, self._seconds = self._seconds, 0, []
        with self._meter.paused():  # processes must not communicate while a step does
            return self._end_round(step, measured)

    def _end_round(self, step: int, measured: Sequence[float]) -> Compiled | None:
        """Return the next program, from the times of a round's steps or if it has been compiled.

        All processes call it, also those that have timed no step.
        """
        if self._compiling is not None:
            return self._check_compiled(step, self._compiling)
        wanted = self._wanted
        if measured and is_main_process():
            wanted = self._decider.measured(step, statistics.median(measured))
        return self._switch_to(step, self._agreed(wanted))

    def finish(self) -> None:
        """Report it if the run ends in the middle of a search."""
        if self._run.choices is not None and self._searching:
            self._decider.report_unfinished()

    def _agreed(self, wanted: int) -> int:
        """The choice that process 0 wants. All processes call it."""
        choice, searching = divmod(allgather(2 * wanted + self._decider.searching)[0], 2)
        self._searching = bool(searching)
        return choice

    def _switch_to(self, step: int, choice: int) -> Compiled | None:
        """Return the program of a choice, or start to compile it in the background while training continues."""
        self._wanted = choice
        if choice in self._programs:
            return self._programs[choice]
        self._log.info(f"step {step}: compiling {self._choices.describe(choice)} while training continues")
        batch, target, mesh = self._run.batch_shape, self._run.target, self._run.trainer.mesh
        # here and not in the background, as it may communicate with other processes
        try:
            trainer = make_trainer(self._choices.config_of(choice), mesh)
        except UserError as error:  # the same on all processes
            problem = error

            def fail() -> Compiled:
                raise problem

            self._compiling = AgreedCompile(fail)
            return None
        assert trainer.state_shapes == self._run.trainer.state_shapes, "a choice may not change the state"
        self._compiling = AgreedCompile(lambda: compiled(step_program(trainer, batch, target)))
        return None

    def _check_compiled(self, step: int, program: AgreedCompile) -> Compiled | None:
        """Switch to a program if all processes have compiled it, or to another choice if one of them has failed."""
        state = program.agreed_state()
        if state is State.COMPILING:
            return None
        self._compiling = None
        if state is State.COMPILED:
            self._programs[self._wanted] = program.result()
            return self._switch_to(step, self._wanted)
        failed = self._decider.failed(step, program.reason) if is_main_process() else 0
        return self._switch_to(step, self._agreed(failed))


class _Decider:
    """Process 0's part: decides which choice to use next, reports it, and saves the result."""

    def __init__(self, choices: Choices, tune: TuneConfig, folder: Path, log: RunLog):
        self._choices, self._samples, self._folder, self._log = choices, tune.samples, folder, log
        self._tuner = Tuner(
            choices.values, samples=tune.samples, band=tune.band, start=choices.first, best_s=choices.best_s
        )

    @property
    def searching(self) -> bool:
        return self._tuner.searching

    @property
    def search_state(self) -> dict[str, Any] | None:
        return self._tuner.search_state

    def resume(self, search_state: Mapping[str, Any]) -> int:
        """Resume an interrupted search; returns the choice to use."""
        self._tuner.resume(search_state)
        self._log.info(f"the search continues after {self._tuner.sample} of {self._samples} samples")
        return self._tuner.in_use

    def measured(self, step: int, seconds: float) -> int:
        """The choice to use after a round with a median step time of `seconds`."""
        tuner, choices, used, best_s = self._tuner, self._choices, self._tuner.in_use, self._tuner.best_s
        wanted = tuner.observe(seconds)
        if best_s is not None and not tuner.searching:
            return wanted
        took = human_seconds(seconds)
        if best_s is not None:
            self._log.info(f"step {step}: {took} per step, which was {human_seconds(best_s)}: tuning again")
        self._log.write({"step": step} | _named("tried", choices, used) | {"tried_step_s": seconds})
        sample = f"sample {tuner.sample} of {self._samples}"
        self._log.info(f"step {step}: {choices.describe(used)}, {took} per step ({sample})")
        self._save_result(step)
        return wanted

    def failed(self, step: int, reason: str) -> int:
        """The choice to use instead of one that cannot be compiled."""
        self._log.warn(f"step {step}: {self._choices.describe(self._tuner.in_use)} cannot be compiled, {reason}")
        wanted = self._tuner.drop()
        self._save_result(step)
        return wanted

    def report_unfinished(self) -> None:
        """Print that the run ends before the search does."""
        taken = f"{self._tuner.sample} of {self._samples} samples"
        self._log.info(
            f"search not finished: {taken}, so nothing is chosen; it needs more steps, and continues with the run"
        )

    def _save_result(self, step: int) -> None:
        """At the end of a search, record its result and write it to the cache and the run's config."""
        choices, found, best_s = self._choices, self._tuner.in_use, self._tuner.best_s
        if best_s is None:
            return
        self._log.write({"step": step} | _named("chosen", choices, found) | {"chosen_step_s": best_s})
        self._log.info(f"step {step}: continuing with {choices.describe(found)}, {human_seconds(best_s)} per step")
        config = self._folder / "config.yaml"
        self._write(choices.file, lambda: choices.write(found, best_s))
        self._write(config, lambda: write_atomically(config, to_yaml(choices.config_of(found))))

    def _write(self, file: Path, write: Callable[[], None]) -> None:
        """Call a function that writes a file. If it fails, the run continues with the result, after a warning."""
        try:
            write()
        except (ConfigError, OSError) as error:
            self._log.warn(f"{file} does not have what was tuned: {error}")


def _plain(choices: Choices) -> dict[str, Any]:
    """The choices as JSON values: a search is only resumed if they are the same."""
    plain: dict[str, Any] = json.loads(json.dumps({"values": choices.values, "key": choices.key}))
    return plain


def _named(prefix: str, choices: Choices, number: int) -> dict[str, float | str]:
    return {f"{prefix}_{name}": value for name, value in choices.settings(number).items()}
