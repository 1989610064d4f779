"""What is due behind a step: copies that make it safe, a validation, a checkpoint."""

import math
from typing import Any

import jax
from jax.stages import Compiled

from moe_jax.checkpoint.save import Checkpoints
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import ConfigError
from moe_jax.run.replicator import Safety
from moe_jax.run.setup import Programs, Run, write_start
from moe_jax.run.tuning import Tuning
from moe_jax.step.compile_cache import Pending
from moe_jax.step.context import State
from moe_jax.step.expert_placement import slots_of
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog


class StepCallbacks:
    """Of one run. All processes call all of its methods; none of them counts as training."""

    def __init__(
        self,
        run: Run,
        programs: Programs,
        meter: Meter,
        tuning: Tuning,
        checkpoints: Checkpoints,
        safety: Safety,
        log: RunLog,
    ):
        self._run, self._meter, self._tuning = run, meter, tuning
        self._checkpoints, self._safety, self._log = checkpoints, safety, log
        self.evaluate: Pending = programs.evaluate
        self._fingerprint = programs.fingerprint

    def keep_safe(self, step: int, state: State) -> None:
        """Make the copies that are due, before the step is recorded."""
        if self._safety.due(step):
            with self._meter.paused(recorded=False):
                if self._meter.bad_steps.may_save(step):
                    self._safety.keep(step, state, is_recorded=self._meter.is_recorded(step), **self._on_host())

    def validate_and_save(self, step: int, state: State, is_validated: bool = False) -> None:
        """Raises DivergedError for a validation loss that is not finite, before the state is saved."""
        config = self._run.config
        if self._is_due(step, config.train.eval_every) and not is_validated:
            with self._meter.paused():
                self._meter.record_validation(step, _validate(self.evaluate.result(), state, self._run))
        if self._is_due(step, config.checkpoint.every):
            with self._meter.paused():
                if self._meter.bad_steps.may_save(step):
                    self.save(step, state)

    def save(self, step: int, state: State) -> None:
        """Start to save a checkpoint. Without the run's config nobody could read it: that is put back if it is gone."""
        folder = self._run.folder
        if is_main_process() and not (folder / "config.yaml").exists():
            try:
                write_start(self._run, self._fingerprint)
                told = "is put back"
            except (ConfigError, ValueError) as error:
                told = f"cannot be put back: {error}"
            self._log.alarm(step, f"{folder / 'config.yaml'} was deleted during the run: it {told}")
        self._checkpoints.save(step, state, **self._on_host())

    def _on_host(self) -> dict[str, Any]:
        """What is kept with the state."""
        losses = self._meter.bad_steps.recent_losses
        return {"data": self._run.batches.get_state(), "tuner": self._tuning.under_way, "recent_losses": losses}

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._run.config.train.steps or (every > 0 and step % every == 0)


def _validate(evaluate: Compiled, state: State, run: Run) -> float:
    """Mean nats per token over the validation batches."""
    # one program at a time: on simulated devices several can keep the threads that each other's collectives wait for
    jax.block_until_ready(state)
    losses = [float(evaluate(state["params"], run.on_mesh(rows), slots_of(state))) for rows in run.validation]
    return math.fsum(losses) / len(losses)
