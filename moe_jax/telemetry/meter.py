"""Turns the metrics that a step returns, which are on the devices, into the records of a run."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.errors import DivergedError
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.telemetry.energy import Joules
from moe_jax.telemetry.nonfinite_steps import BadSteps, divergence_advice
from moe_jax.telemetry.router_alarms import Alarms, load_statistics
from moe_jax.telemetry.run_log import RunLog
from moe_jax.telemetry.step_completion import Clock, CompletionListener, StepCompletion, Usage

Metrics = dict[str, jax.Array]

_LOADS_PER_RECORD = 1024  # on average: numbers of experts' loads
_SHORTEST_S = 0.1  # shortest time for a mean


class Mark(NamedTuple):
    """The end of a recorded step, from which the mean usage of a later record may be measured."""

    usage: Usage
    timed_steps: int  # up to this step
    step: int


class MeanUsage:
    """Time and energy per timed step, measured from the end of an earlier recorded step to that of the present one.

    The end of a step is observed some milliseconds late, on busy hosts more. So a mean starts at the last record that
    is at least _SHORTEST_S old, if there is one. It never starts at a record that was observed late by an unknown time.
    """

    def __init__(self, start: Usage) -> None:
        self.timed_steps = self._recorded_steps = 0  # timed steps up to now, and up to the last record
        self._marks = [Mark(start, 0, 0)]  # oldest first

    def exclude(self, start: Usage, end: Usage) -> None:
        """Do not count the time and energy between two moments as training."""
        self._marks = [mark._replace(usage=mark.usage.without(start, end)) for mark in self._marks]

    def observed_late(self, step: int) -> None:
        """Start no mean at the end of this step."""
        if len(self._marks) > 1 and self._marks[-1].step == step:
            self._marks.pop()

    def record(self, step: int, end: Usage) -> Usage | None:
        """The mean up to this step; None if no step was timed since the last record."""
        mean = self._until(end) if self.timed_steps > self._recorded_steps else None
        self._recorded_steps = self.timed_steps
        self._marks.append(Mark(end, self.timed_steps, step))
        return mean

    def _until(self, end: Usage) -> Usage:
        early = [mark for mark in self._marks if end.time_s - mark.usage.time_s >= _SHORTEST_S]
        self._marks = [*early[-1:], *self._marks[len(early) :]]
        start, timed_steps, _ = self._marks[0]
        steps = self.timed_steps - timed_steps
        return Usage((end.time_s - start.time_s) / steps, (end.energy_j - start.energy_j) / steps)


class Meter:
    """Reads and records each step's metrics while the next step runs, so that the devices never wait for the host."""

    def __init__(
        self,
        config: Config,
        log: RunLog,
        peak_flops_per_s: float,
        joules: Joules | None = None,
        listener: Callable[[Clock], CompletionListener] = CompletionListener,
        metrics_at: Callable[[int], Mapping[str, float]] = lambda step: {},
    ):
        """`peak_flops_per_s`: of all devices together, for MFU. `joules`: reads the energy used, if it is counted.
        `metrics_at`: metrics of a step that the host knows, such as the tokens of each source.
        """
        self._config, self._log, self._peak, self._metrics_at = config, log, peak_flops_per_s, metrics_at
        self._now = Clock(joules, log.warn)
        self._listener = listener(self._now)
        self._tokens = config.train.batch_size * config.data.seq_len
        self._flops = self._tokens * train_flops_per_token(config.model, config.data.seq_len)
        moe = config.model.moe
        loads = config.model.block_kinds.count("moe") * moe.num_experts
        self._loads_every = config.log.expert_load_every or max(1, math.ceil(loads / _LOADS_PER_RECORD))
        self._drops_are_known = moe.num_experts == 0 or not moe.sends_sized_rows
        self._alarms = Alarms(config, log)
        self.bad_steps = BadSteps(config, log)
        self._waiting: tuple[int, StepCompletion, bool] | None = None  # step number, completion, whether it is timed
        self._done: tuple[int, Metrics] | None = None  # a finished step that is not recorded yet
        self._ended = self._now()  # end of the preceding step or pause
        self._mean_usage = MeanUsage(self._ended)
        self._peak_was_exceeded = False
        self.step_s: float | None = None  # duration of the step that `add` waited for; None if it was not timed

    def add(self, step: int, metrics: Metrics, timed: bool = True) -> None:
        """Take the metrics of a step just started, wait for the preceding step, and record that one if it is due.

        `timed` is false for a step that ran while the meter was `paused`.
        """
        completion = self._listener.watch(metrics)
        self.finish()
        self._waiting = step, completion, timed
        self._mean_usage.timed_steps += timed

    def wait(self) -> None:
        """Wait for the last step passed to `add`, and update timing, bad steps and alarms; `finish` records it."""
        if self._waiting is None:
            return
        step, completion, timed = self._waiting
        self._waiting = None
        now, is_late = completion.wait()
        metrics: Metrics = completion.arrays
        self.step_s = now.time_s - self._ended.time_s if timed and not is_late else None
        if not timed:
            self._mean_usage.exclude(self._ended, now)
        if is_late:
            self._mean_usage.observed_late(step - 1)
        self._ended = now
        self._warn_of_drops(step, metrics)
        self.bad_steps.update(step, metrics)
        if "expert_load" in metrics and not self.bad_steps.in_a_row:
            self._alarms.count(metrics["expert_load"])
        self._done = step, metrics

    def finish(self, stopping: bool = False) -> None:
        """Wait for the last step passed to `add`, and record it if it is due or the run ends with it (`stopping`)."""
        self.wait()
        if self._done is None:
            self.step_s = None
            return
        (step, metrics), self._done = self._done, None
        if stopping or self.is_recorded(step):
            self._record(step, metrics)

    def is_recorded(self, step: int) -> bool:
        """Whether a record of this step is due, even if the run does not end with it."""
        return step % self._config.log.every == 0 or step in (1, self._config.train.steps)

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Record validation losses, by name. Raises DivergedError if `validation_loss` is not finite and the state
        would be saved.
        """
        self._log.write({"step": step, **losses})
        loss = losses["validation_loss"]
        if not math.isfinite(loss) and self.bad_steps.may_save(step):
            raise DivergedError(
                f"step {step} has validation_loss={loss:g}: training has diverged, and what came of it is not saved: "
                f"{divergence_advice(self._config)}"
            )

    @contextmanager
    def paused(self, recorded: bool = True) -> Iterator[None]:
        """Finish the last step, then run the body, whose time does not count as training.

        With `recorded=False`, the last step is waited for but recorded only after the body.
        """
        if recorded:
            self.finish()
        else:
            self.wait()
        start = self._now()
        yield
        self._ended = self._now()
        self._mean_usage.exclude(start, self._ended)

    def _warn_of_drops(self, step: int, metrics: Metrics) -> None:
        """Warn once if rows of dropless experts are dropped because a rank's buffer is full."""
        if self._drops_are_known or (fraction := float(metrics["dropped_fraction"])) == 0:
            return
        self._drops_are_known = True
        factor = self._config.exchange.rank_capacity_factor
        self._log.warn(
            f"step {step} dropped {fraction:.2g} of all rows, as exchange.rank_capacity_factor={factor} leaves some "
            "expert "
            "rank no room for them: use a larger one, or null for the worst case "
            "(this is said once; dropped_fraction continues counting)"
        )

    def _record(self, step: int, metrics: Metrics) -> None:
        """Write the record of a finished step."""
        read = jax.device_get(metrics)
        del read["bad_step"]
        statistics = load_statistics(read["expert_load"]) if "expert_load" in read else {}
        if not self._has_loads(step):
            read.pop("expert_load", None)
        by_source = zip(self._config.data.sources, read.pop("source_loss", ()), strict=False)
        values = {name: _rounded(value) for name, value in read.items()} | statistics
        values |= {f"loss/{source.label}": _rounded(loss) for source, loss in by_source if np.isfinite(loss)}
        values |= {**self.bad_steps.counts(), **self._metrics_at(step)}
        if (mean := self._mean_usage.record(step, self._ended)) is not None:
            values |= self._rates(step, *mean)
        self._log.write({"step": step} | values)
        if statistics:
            self._alarms.check(step, statistics)

    def _rates(self, step: int, step_s: float, energy_j: float) -> dict[str, float]:
        """Step time, tokens per second, MFU and energy of a record."""
        rates = {"step_s": step_s, "tokens_per_s": self._tokens / step_s}
        if (mfu := self._flops / step_s / self._peak) <= 1:
            rates["mfu"] = mfu
        elif not self._peak_was_exceeded:
            self._peak_was_exceeded = True
            self._log.warn(
                f"step {step} ran {self._flops / step_s:.3g} FLOP/s, more than the {self._peak:.3g} that were measured "
                "as the device's peak before the first step, when it was perhaps busy: such steps have no MFU"
            )
        if self._now.counts_energy:
            rates["energy_j_per_step"] = energy_j
        return rates

    def _has_loads(self, step: int) -> bool:
        """Whether the record of a step contains the load of each expert: the first, the last and every n-th record."""
        return step in (1, self._config.train.steps) or step // self._config.log.every % self._loads_every == 0


def _rounded(value: NDArray[np.float32]) -> float | list[float]:
    """A scalar with the fewest decimals that determine the float32; lists rounded to 6 decimals."""
    return float(str(value)) if value.ndim == 0 else np.round(value.astype(float), 6).tolist()
