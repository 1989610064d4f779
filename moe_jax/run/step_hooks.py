"""Callbacks after each step: safety copies, validation, and checkpoints, when they are due."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.stages import Compiled

from moe_jax.checkpoint.save import Checkpoints
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import ConfigError
from moe_jax.run.replicator import Replicator
from moe_jax.run.setup import Programs, Run, write_start
from moe_jax.run.tuning import Tuning
from moe_jax.run.validation import Rows, loss_metrics
from moe_jax.step.compile_cache import Pending
from moe_jax.step.context import State
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.moving_average import evaluated
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog


class StepCallbacks:
    """The callbacks of one run. All processes call all methods. Their time does not count as training time."""

    def __init__(
        self,
        run: Run,
        programs: Programs,
        meter: Meter,
        tuning: Tuning,
        checkpoints: Checkpoints,
        replicator: Replicator,
        log: RunLog,
    ):
        self._run, self._meter, self._tuning = run, meter, tuning
        self._checkpoints, self._replicator, self._log = checkpoints, replicator, log
        self.evaluate: Pending = programs.evaluate
        self._fingerprint = programs.fingerprint

    def replicate(self, step: int, state: State) -> None:
        """Make safety copies if they are due, before the step is recorded."""
        if self._replicator.due(step):
            with self._meter.paused(recorded=False):
                if self._meter.bad_steps.may_save(step):
                    is_recorded = self._meter.is_recorded(step)
                    self._replicator.replicate(step, state, is_recorded=is_recorded, **self._on_host())

    def validate_and_save(self, step: int, state: State, is_validated: bool = False) -> None:
        """Validate, unless `is_validated`, and save a checkpoint, if they are due.

        Raises DivergedError for a validation loss that is not finite, before the state is saved.
        """
        config = self._run.config
        if self._is_due(step, config.train.eval_every) and not is_validated:
            with self._meter.paused():
                self._meter.record_validation(step, _validate(self.evaluate.result(), state, self._run))
        if self._is_due(step, config.checkpoint.every):
            with self._meter.paused():
                if self._meter.bad_steps.may_save(step):
                    self.save(step, state)

    def save(self, step: int, state: State) -> None:
        """Start to save a checkpoint. If the run's config.yaml was deleted, it is written again: readers need it."""
        folder = self._run.folder
        if is_main_process() and not (folder / "config.yaml").exists():
            try:
                write_start(self._run, self._fingerprint)
                outcome = "is put back"
            except (ConfigError, ValueError) as error:
                outcome = f"cannot be put back: {error}"
            self._log.alarm(step, f"{folder / 'config.yaml'} was deleted during the run: it {outcome}")
        self._checkpoints.save(step, state, **self._on_host())

    def _on_host(self) -> dict[str, Any]:
        """The state of the run on the host, saved with that on the devices."""
        losses = self._meter.bad_steps.recent_losses
        return {"data": self._run.batches.get_state(), "tuner": self._tuning.search_state, "recent_losses": losses}

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._run.config.train.steps or (every > 0 and step % every == 0)


def _validate(evaluate: Compiled, state: State, run: Run) -> Mapping[str, float]:
    """The validation losses, in nats per token, by their names in metrics."""
    # one program at a time: simulated devices share threads, and collectives of two programs could deadlock
    jax.block_until_ready(state)

    def loss_of(rows: Rows) -> float:
        return float(evaluate(evaluated(state), run.on_mesh(rows), slots_of(state)))

    losses = [each.loss(loss_of) for each in run.validation]
    names = [source.label for source in run.config.data.sources]
    return loss_metrics(losses, run.mixture.weights_at(int(state["step"])), names)
