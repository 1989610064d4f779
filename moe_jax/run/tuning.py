"""The training step of a run, exchanged for others while it trains, until the fastest is found."""

import json
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from moe_jax.config import TuneConfig
from moe_jax.config.yaml_io import to_yaml
from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.errors import ConfigError, UserError
from moe_jax.files.atomic import write_atomically
from moe_jax.plan.tuner import Tuner
from moe_jax.run.setup import Run
from moe_jax.run.tuning_space import Choices
from moe_jax.step.compile import step_program
from moe_jax.step.compile_cache import compiled
from moe_jax.step.trainer import make_trainer
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog, human_seconds

_SETTLING = 3  # steps at the start of a round that do not count, as a new program is slow at first
_COMPILING, _COMPILED, _FAILED = range(3)


class Tuning:
    """`step` is the compiled step in use. Without `tune.over` it stays the first one.

    Steps are counted in rounds, which are as long on all processes. At the end of each, process 0 says what to use.
    `under_way` is what this property was where the run goes on.
    """

    def __init__(
        self, run: Run, first: Compiled, meter: Meter, log: RunLog, under_way: Mapping[str, Any] | None = None
    ):
        self.step = first
        self._run, self._meter, self._log = run, meter, log
        self._compiling: Future[Compiled] | None = None
        self._steps, self._seconds = 0, list[float]()  # of this round
        if run.choices is not None:
            self._choices, self._wanted = run.choices, run.choices.first
            self._programs = {run.choices.first: first}
            self._searching = run.choices.best_s is None
            self._decider = _Decider(run.choices, run.config.tune, run.folder, log)
            if under_way and self._searching and under_way["choices"] == _plain(run.choices):
                self._use(run.first_step, self._decider.go_on(under_way["search"]))

    @property
    def under_way(self) -> dict[str, Any] | None:
        """The search of process 0 as plain values, for a checkpoint; None without one."""
        if self._run.choices is None or not self._searching:
            return None
        return {"choices": _plain(self._run.choices), "search": self._decider.under_way}

    def step_started(self, step: int) -> None:
        """Count a step that was started. All processes call it behind every step.

        At the end of a round, the same step on all, `step` may become another program. Steps during a compilation are
        not timed.
        """
        if self._run.choices is None:
            return
        self._steps += 1
        compiling, seconds, tune = self._compiling, self._meter.step_s, self._run.config.tune
        if compiling is None and self._steps > _SETTLING and seconds is not None:
            self._seconds.append(seconds)
        length = tune.iterations if self._searching else tune.patience
        if self._steps < _SETTLING + length:
            return
        measured, self._steps, self._seconds = self._seconds, 0, []
        with self._meter.paused():  # processes must not talk while a step does
            if compiling is not None:
                self._look(step, compiling)
            else:  # on all processes: some may have heard of no step in time
                wanted = self._wanted
                if measured and is_main_process():
                    wanted = self._decider.measured(step, statistics.median(measured))
                self._use(step, self._agreed(wanted))

    def finish(self) -> None:
        """Say so if the run ends in the middle of a search."""
        if self._run.choices is not None and self._searching:
            self._decider.unfinished()

    def _agreed(self, wanted: int) -> int:
        """What process 0 wants."""
        choice, searching = divmod(allgather(2 * wanted + self._decider.searching)[0], 2)
        self._searching = bool(searching)
        return choice

    def _use(self, step: int, choice: int) -> None:
        """Switch to a choice, or have it compiled first while training goes on."""
        self._wanted = choice
        if choice in self._programs:
            self.step = self._programs[choice]
            return
        self._log.info(f"step {step}: compiling {self._choices.told(choice)} while training goes on")
        # here and not beside training, as it may talk with other processes
        try:
            trainer = make_trainer(self._choices.config_of(choice), self._run.trainer.mesh)
        except UserError as error:  # on all processes alike
            self._compiling = Future()
            self._compiling.set_exception(error)
            return
        assert trainer.state_shapes == self._run.trainer.state_shapes, "a choice may not change the state"
        batch, target = self._run.batch_shape, self._run.target
        pool = ThreadPoolExecutor(max_workers=1)
        self._compiling = pool.submit(lambda: compiled(step_program(trainer, batch, target)))
        pool.shutdown(wait=False)

    def _look(self, step: int, program: Future[Compiled]) -> None:
        """Switch to the compiled step, once all processes have it."""
        states = allgather(_COMPILING if not program.done() else _FAILED if program.exception() else _COMPILED)
        if _COMPILING in states:
            return
        self._compiling = None
        if _FAILED not in states:
            self._programs[self._wanted] = program.result()
            self._use(step, self._wanted)
            return
        reason = str(program.exception() or "on another process").partition("\n")[0]
        self._use(step, self._agreed(self._decider.failed(step, reason) if is_main_process() else 0))


class _Decider:
    """What process 0 decides, tells and keeps."""

    def __init__(self, choices: Choices, tune: TuneConfig, folder: Path, log: RunLog):
        self._choices, self._samples, self._folder, self._log = choices, tune.samples, folder, log
        self._tuner = Tuner(
            choices.values, samples=tune.samples, band=tune.band, start=choices.first, best_s=choices.best_s
        )

    @property
    def searching(self) -> bool:
        return self._tuner.searching

    @property
    def under_way(self) -> dict[str, Any] | None:
        return self._tuner.under_way

    def go_on(self, under_way: Mapping[str, Any]) -> int:
        """What to use where a search was interrupted."""
        self._tuner.go_on(under_way)
        self._log.info(f"the search goes on behind {self._tuner.sample} of {self._samples} samples")
        return self._tuner.in_use

    def measured(self, step: int, seconds: float) -> int:
        """What to use after a round whose steps took `seconds`."""
        tuner, choices, used, best_s = self._tuner, self._choices, self._tuner.in_use, self._tuner.best_s
        wanted = tuner.observe(seconds)
        if best_s is not None and not tuner.searching:
            return wanted
        took = human_seconds(seconds)
        if best_s is not None:
            self._log.info(f"step {step}: {took} per step, which was {human_seconds(best_s)}: tuning again")
        self._log.write({"step": step} | _named("tried", choices, used) | {"tried_step_s": seconds})
        self._log.info(f"step {step}: {choices.told(used)}, {took} per step (sample {tuner.sample} of {self._samples})")
        self._keep(step)
        return wanted

    def failed(self, step: int, reason: str) -> int:
        """What to use instead of a choice that cannot be compiled."""
        self._log.warn(f"step {step}: {self._choices.told(self._tuner.in_use)} cannot be compiled, {reason}")
        wanted = self._tuner.drop()
        self._keep(step)
        return wanted

    def unfinished(self) -> None:
        """A search is under way as the run ends."""
        taken = f"{self._tuner.sample} of {self._samples} samples"
        self._log.info(
            f"search not finished: {taken}, so nothing is chosen; it needs more steps, and goes on with the run"
        )

    def _keep(self, step: int) -> None:
        """What a search found, at its end."""
        choices, found, best_s = self._choices, self._tuner.in_use, self._tuner.best_s
        if best_s is None:
            return
        self._log.write({"step": step} | _named("chosen", choices, found) | {"chosen_step_s": best_s})
        self._log.info(f"step {step}: going on with {choices.told(found)}, {human_seconds(best_s)} per step")
        config = self._folder / "config.yaml"
        self._write(choices.file, lambda: choices.write(found, best_s))
        self._write(config, lambda: write_atomically(config, to_yaml(choices.config_of(found))))

    def _write(self, file: Path, write: Callable[[], None]) -> None:
        """What is found outlives a disk that has become full meanwhile: the run goes on with it."""
        try:
            write()
        except (ConfigError, OSError) as error:
            self._log.warn(f"{file} does not have what was tuned: {error}")


def _plain(choices: Choices) -> dict[str, Any]:
    """As JSON has it: what samples of another run's choices must not be mixed with."""
    plain: dict[str, Any] = json.loads(json.dumps({"values": choices.values, "key": choices.key}))
    return plain


def _named(prefix: str, choices: Choices, number: int) -> dict[str, float | str]:
    return {f"{prefix}_{name}": value for name, value in choices.settings(number).items()}
