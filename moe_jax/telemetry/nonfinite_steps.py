"""Counts of bad steps, whose updates are skipped on the devices, and detection of loss spikes, on the host."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from moe_jax.config import Config
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.telemetry.run_log import RunLog

_WINDOW = 64  # latest finite losses; a loss is a spike if it exceeds a multiple of their median
_FEWEST = 8  # losses needed before a spike is detected


class BadStep(NamedTuple):
    """A step whose update was skipped, with the numbers that show why."""

    step: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        values = {"loss": self.loss, "grad_norm": self.grad_norm}
        wrong = ", ".join(f"{name}={value:g}" for name, value in values.items() if not math.isfinite(value))
        return f"step {self.step} has {wrong or f'a spike, loss={self.loss:g}'}"


class BadSteps:
    """Counts bad steps and loss spikes from the metrics of each finished step. All processes get the same counts."""

    def __init__(self, config: Config, log: RunLog):
        self._config, self._log = config, log
        # the newest loss may not be part of the window for the next step yet (see `loss_bound`), hence one more
        self._losses: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self.count = self.in_a_row = self.spikes = 0
        self.last: BadStep | None = None

    @property
    def recent_losses(self) -> list[tuple[int, float]]:
        """The latest finite losses, each with its step, to be saved with the state."""
        return [*self._losses]

    def restore_losses(self, losses: Sequence[tuple[int, float]]) -> None:
        """Take the recent losses of the run that this one resumes."""
        self._losses.extend((step, loss) for step, loss in losses)

    @property
    def too_many(self) -> bool:
        """Whether the last `train.bad_in_a_row` steps were all bad."""
        limit = self._config.train.bad_in_a_row
        return limit is not None and self.in_a_row >= limit

    def may_save(self, step: int) -> bool:
        """Whether this step may be saved: not while steps are bad, except at the end of the run."""
        return not self.too_many and (not self.in_a_row or step == self._config.train.steps)

    def update(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of the next finished step; ignored after too many bad ones."""
        if self.too_many:
            return
        is_bad = bool(metrics["bad_step"])
        if not is_bad and self._config.train.spike_factor is None:
            self.in_a_row = 0
            return
        found = BadStep(step, float(metrics["loss"]), float(metrics["grad_norm"]))
        if math.isfinite(found.loss):
            self._check_spike(step, found.loss)
        self.in_a_row = self.in_a_row + 1 if is_bad else 0
        if is_bad:
            self._report(found)

    def counts(self) -> dict[str, int]:
        """The counts for a record of metrics."""
        spikes = {} if self._config.train.spike_factor is None else {"loss_spikes": self.spikes}
        return {"bad_steps": self.count} | spikes

    def loss_bound(self, mesh: Mesh, done: int) -> tuple[jax.Array, ...]:
        """The largest loss with which the step after `done` ones is not skipped; empty if spikes are not skipped.

        The loss of step number `done` is never used, since this step may still be running.
        """
        if not self._config.train.skip_spikes:
            return ()
        sharding = NamedSharding(mesh, REPLICATED)
        bound = np.asarray(self._bound_of(self._window(done)), np.float32)
        return (jax.make_array_from_process_local_data(sharding, bound),)

    def _window(self, before: int) -> list[float]:
        """The latest finite losses before a step."""
        return [loss for step, loss in self._losses if step < before][-_WINDOW:]

    def _bound_of(self, losses: Sequence[float]) -> float:
        """A loss above this number is a spike, if these are the losses before it."""
        factor = self._config.train.spike_factor
        return math.inf if factor is None or len(losses) < _FEWEST else factor * statistics.median(losses)

    def _report(self, bad: BadStep) -> None:
        """Count a bad step, and warn if it is the first in a row."""
        self.last, self.count = bad, self.count + 1
        if self.in_a_row == 1:
            limit = self._config.train.bad_in_a_row
            of = "" if limit is None else f" (1 of {limit} in a row)"
            self._log.warn(f"{bad}: parameters, optimizer and balance are left as they were{of}")

    def _check_spike(self, step: int, loss: float) -> None:
        """Count a loss and warn if it is a spike, and add it to the recent losses."""
        factor, losses = self._config.train.spike_factor, self._window(step)
        if factor is None:
            return
        if loss > (bound := self._bound_of(losses)):
            self.spikes += 1
            self._log.warn(
                f"step {step}: loss {loss:.4g} is {loss * factor / bound:.2f} × the median of the last "
                f"{len(losses)} (train.spike_factor={factor:g})"
            )
        self._losses.append((step, loss))


def divergence_advice(config: Config) -> str:
    """The end of a message about a diverged run: settings that help."""
    return f"use an optimizer.learning_rate below {config.optimizer.learning_rate:g}, or more optimizer.warmup_steps"
