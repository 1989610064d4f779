"""Bad steps of a run, which change nothing, as the host sees them: how many, how many in a row; losses that jump."""

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

_WINDOW = 64  # finite losses whose median a spike is measured by
_FEWEST = 8  # of them, before any is


class BadStep(NamedTuple):
    """A step that changed nothing, and why."""

    step: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        values = {"loss": self.loss, "grad_norm": self.grad_norm}
        wrong = ", ".join(f"{name}={value:g}" for name, value in values.items() if not math.isfinite(value))
        return f"step {self.step} has {wrong or f'a spike, loss={self.loss:g}'}"


class BadSteps:
    """Counts them from the metrics of each finished step. All processes see the same."""

    def __init__(self, config: Config, log: RunLog):
        self._config, self._log = config, log
        self._losses: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)  # the last may be none to measure by yet
        self.count = self.in_a_row = self.spikes = 0
        self.last: BadStep | None = None

    @property
    def recent_losses(self) -> list[tuple[int, float]]:
        """Finite ones with their steps, to be kept with the state."""
        return [*self._losses]

    def remember(self, losses: Sequence[tuple[int, float]]) -> None:
        """Those of the run that this one goes on with."""
        self._losses.extend((step, loss) for step, loss in losses)

    @property
    def too_many(self) -> bool:
        """Whether `train.bad_in_a_row` in a row were bad."""
        limit = self._config.train.bad_in_a_row
        return limit is not None and self.in_a_row >= limit

    def may_save(self, step: int) -> bool:
        """Whether a checkpoint of this step is worth it: not while steps are bad, but at the end of the run."""
        return not self.too_many and (not self.in_a_row or step == self._config.train.steps)

    def look(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take in the metrics of the next finished step; none behind too many bad ones."""
        if self.too_many:
            return
        is_bad = bool(metrics["bad_step"])
        if not is_bad and self._config.train.spike_factor is None:
            self.in_a_row = 0
            return
        seen = BadStep(step, float(metrics["loss"]), float(metrics["grad_norm"]))
        if math.isfinite(seen.loss):
            self._look_for_spike(step, seen.loss)
        self.in_a_row = self.in_a_row + 1 if is_bad else 0
        if is_bad:
            self._tell(seen)

    def numbers(self) -> dict[str, int]:
        """For records."""
        spikes = {} if self._config.train.spike_factor is None else {"loss_spikes": self.spikes}
        return {"bad_steps": self.count} | spikes

    def bound(self, mesh: Mesh, done: int) -> tuple[jax.Array, ...]:
        """The largest loss that the step behind `done` ones may learn from; nothing if spikes are not skipped.

        The last of them may still run, so it is not looked at, whether it does or not.
        """
        if not self._config.train.skip_spikes:
            return ()
        sharding = NamedSharding(mesh, REPLICATED)
        most = np.asarray(self._most(self._window(done)), np.float32)
        return (jax.make_array_from_process_local_data(sharding, most),)

    def _window(self, before: int) -> list[float]:
        return [loss for step, loss in self._losses if step < before][-_WINDOW:]

    def _most(self, losses: Sequence[float]) -> float:
        """Behind these a loss above is a spike."""
        factor = self._config.train.spike_factor
        return math.inf if factor is None or len(losses) < _FEWEST else factor * statistics.median(losses)

    def _tell(self, bad: BadStep) -> None:
        self.last, self.count = bad, self.count + 1
        if self.in_a_row == 1:
            limit = self._config.train.bad_in_a_row
            of = "" if limit is None else f" (1 of {limit} in a row)"
            self._log.warn(f"{bad}: parameters, optimizer and balance are left as they were{of}")

    def _look_for_spike(self, step: int, loss: float) -> None:
        factor, losses = self._config.train.spike_factor, self._window(step)
        if factor is None:
            return
        if loss > (most := self._most(losses)):
            self.spikes += 1
            self._log.warn(
                f"step {step}: loss {loss:.4g} is {loss * factor / most:.2f} × the median of the last "
                f"{len(losses)} (train.spike_factor={factor:g})"
            )
        self._losses.append((step, loss))


def slower(config: Config) -> str:
    """What helps a run that has diverged."""
    return f"use an optimizer.learning_rate below {config.optimizer.learning_rate:g}, or more optimizer.warmup_steps"
