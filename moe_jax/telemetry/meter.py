"""Turns the numbers that a step leaves on the devices into the records of a run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.errors import DivergedError
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.telemetry.energy import Joules
from moe_jax.telemetry.nonfinite_steps import BadSteps, slower
from moe_jax.telemetry.router_alarms import Alarms, load_statistics
from moe_jax.telemetry.run_log import RunLog
from moe_jax.telemetry.step_completion import Clock, Finish, Finishes, Spent

Metrics = dict[str, jax.Array]

_LOADS_OF_A_RECORD = 1024  # of experts, on average
_SHORTEST_S = 0.1  # that a rate is of; steps are heard of some milliseconds late, on a busy machine more


class Mark(NamedTuple):
    """A step that was recorded: where a later record's time may begin."""

    spent: Spent
    timed_steps: int  # up to then
    step: int


class Meter:
    """Reads each step's metrics while the next step runs, so that the devices never wait for the host."""

    def __init__(
        self,
        config: Config,
        log: RunLog,
        peak_flops_per_s: float,
        joules: Joules | None = None,
        finishes: Callable[[Clock], Finishes] = Finishes,
    ):
        self._config, self._log, self._peak = config, log, peak_flops_per_s
        self._now = Clock(joules, log.warn)
        self._finishes = finishes(self._now)
        self._tokens = config.train.batch_size * config.data.seq_len
        self._flops = self._tokens * train_flops_per_token(config.model, config.data.seq_len)
        moe = config.model.moe
        loads = config.model.block_kinds.count("moe") * moe.num_experts
        self._loads_every = config.log.expert_load_every or max(1, math.ceil(loads / _LOADS_OF_A_RECORD))
        self._drops_are_known = moe.num_experts == 0 or not moe.sends_sized_rows
        self._alarms = Alarms(config, log)
        self.bad_steps = BadSteps(config, log)
        self._waiting: tuple[int, Finish, bool] | None = None
        self._done: tuple[int, Metrics] | None = None  # and not recorded
        self._ended = self._now()  # the step before, or a pause
        self._timed_steps = self._recorded_steps = 0  # the same up to the last record
        self._marks = [Mark(self._ended, 0, 0)]  # in order
        self._peak_was_exceeded = False
        self.step_s: float | None = None  # seconds of the step that `add` has waited for; None: not timed

    def add(self, step: int, metrics: Metrics, timed: bool = True) -> None:
        """Hand over the metrics of a step just started; records the step before, if it is due.

        A step that ran while the meter was `paused` is not timed.
        """
        finish = self._finishes.of(metrics)
        self.finish()
        self._waiting = step, finish, timed
        self._timed_steps += timed

    def wait(self) -> None:
        """Wait for the last step handed over, and see what became of it; `finish` records it."""
        if self._waiting is None:
            return
        step, finish, timed = self._waiting
        self._waiting = None
        now, is_late = finish.wait()
        metrics: Metrics = finish.arrays
        self.step_s = now.time_s - self._ended.time_s if timed and not is_late else None
        if not timed:
            self._leave_out(self._ended, now)
        if is_late and len(self._marks) > 1 and self._marks[-1].step == step - 1:
            self._marks.pop()
        self._ended = now
        self._warn_of_drops(step, metrics)
        self.bad_steps.look(step, metrics)
        if "expert_load" in metrics and not self.bad_steps.in_a_row:
            self._alarms.count(metrics["expert_load"])
        self._done = step, metrics

    def finish(self, stopping: bool = False) -> None:
        """Wait for the last step handed over and record it, if it is due or the run ends with it."""
        self.wait()
        if self._done is None:
            self.step_s = None
            return
        (step, metrics), self._done = self._done, None
        if stopping or self.records(step):
            self._record(step, metrics)

    def records(self, step: int) -> bool:
        """Whether a record of this step is due, wherever the run ends."""
        return step % self._config.log.every == 0 or step in (1, self._config.train.steps)

    def validated(self, step: int, loss: float) -> None:
        """Record a validation. Raises DivergedError if its loss is not finite, and the state would be saved."""
        self._log.write({"step": step, "validation_loss": loss})
        if not math.isfinite(loss) and self.bad_steps.may_save(step):
            raise DivergedError(
                f"step {step} has validation_loss={loss:g}: training has diverged, and what came of it is not saved: "
                f"{slower(self._config)}"
            )

    @contextmanager
    def paused(self, recorded: bool = True) -> Iterator[None]:
        """Finish, then do something that is not training and does not count as its time.

        Not `recorded`, the last step is waited for alone: its record comes behind what is done.
        """
        if recorded:
            self.finish()
        else:
            self.wait()
        start = self._now()
        yield
        self._ended = self._now()
        self._leave_out(start, self._ended)

    def _leave_out(self, start: Spent, end: Spent) -> None:
        """What was spent between two moments is no training."""
        self._marks = [mark._replace(spent=mark.spent.without(start, end)) for mark in self._marks]

    def _warn_of_drops(self, step: int, metrics: Metrics) -> None:
        """Once, when rows find no room though experts have no capacity."""
        if self._drops_are_known or (fraction := float(metrics["dropped_fraction"])) == 0:
            return
        self._drops_are_known = True
        factor = self._config.exchange.rank_capacity_factor
        self._log.warn(
            f"step {step} dropped {fraction:.2g} of all rows, as exchange.rank_capacity_factor={factor} leaves some "
            "expert "
            "rank no room for them: use a larger one, or null for the worst case "
            "(this is said once; dropped_fraction goes on counting)"
        )

    def _record(self, step: int, metrics: Metrics) -> None:
        read = jax.device_get(metrics)
        del read["bad_step"]
        statistics = load_statistics(read["expert_load"]) if "expert_load" in read else {}
        if not self._has_loads(step):
            read.pop("expert_load", None)
        values = {name: _rounded(value) for name, value in read.items()} | statistics
        values |= self.bad_steps.numbers()
        if self._timed_steps > self._recorded_steps:
            values |= self._rates(step)
        self._recorded_steps = self._timed_steps
        self._marks.append(Mark(self._ended, self._timed_steps, step))
        self._log.write({"step": step} | values)
        if statistics:
            self._alarms.look(step, statistics)

    def _rates(self, step: int) -> dict[str, float]:
        """Means since the last record, or, where that is too short a time, since an earlier one."""
        now = self._ended
        early = [mark for mark in self._marks if now.time_s - mark.spent.time_s >= _SHORTEST_S]
        self._marks = [*early[-1:], *self._marks[len(early) :]]
        start = self._marks[0]
        steps = self._timed_steps - start.timed_steps
        step_s = (now.time_s - start.spent.time_s) / steps
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
            rates["energy_j_per_step"] = (now.energy_j - start.spent.energy_j) / steps
        return rates

    def _has_loads(self, step: int) -> bool:
        """Whether the record of a step has the load of each expert: the first, the last and every n-th one."""
        return step in (1, self._config.train.steps) or step // self._config.log.every % self._loads_every == 0


def _rounded(value: NDArray[np.float32]) -> float | list[float]:
    """The shortest decimals that give the float32 back; shares of experts to 6 digits."""
    return float(str(value)) if value.ndim == 0 else np.round(value.astype(float), 6).tolist()
