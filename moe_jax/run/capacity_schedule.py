"""Capacity factors that change while a run trains (`model.moe.capacity_schedule`).

The shapes in a program depend on the capacity factor, so each factor needs its own programs. Those of the next factor
are compiled in the background while the run trains with the current one.
"""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from moe_jax.config import Config
from moe_jax.measure.targets import Target
from moe_jax.step.compile import config_at, step_program
from moe_jax.step.compile_cache import compiled
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.moving_average import evaluated
from moe_jax.step.trainer import Trainer, make_trainer
from moe_jax.telemetry.run_log import RunLog


@dataclasses.dataclass(frozen=True)
class CapacityChange:
    """A change to another capacity factor."""

    step: int  # the first step with the new factor
    factor: float
    trainer: Trainer


def capacity_changes(config: Config, mesh: Mesh, done: int) -> tuple[CapacityChange, ...]:
    """The remaining changes of a run that has done `done` steps. Raises UserError for a factor that does not fit."""

    def remaining() -> Iterator[CapacityChange]:
        for first, factor in config.model.moe.capacity_schedule:
            if max(done, 1) < first <= config.train.steps:
                yield CapacityChange(int(first), factor, make_trainer(config_at(config, int(first)), mesh))

    return tuple(remaining())


class CapacityPrograms:
    """Compiles the programs of each remaining capacity factor while the preceding factor is in use."""

    def __init__(
        self, changes: tuple[CapacityChange, ...], batch_shape: jax.ShapeDtypeStruct, log: RunLog, target: Target | None
    ):
        self._ahead, self._batch_shape, self._log, self._target = list(changes), batch_shape, log, target
        self._compiling: list[Future[Compiled]] = []
        self._compile_next()

    def begins(self, step: int) -> bool:
        """Whether this step is the first one with another factor."""
        return bool(self._ahead) and self._ahead[0].step == step

    def programs(self) -> tuple[Compiled, Future[Compiled]]:
        """The step program, which is waited for, and the evaluation program of the factor that begins."""
        change, (step, evaluate) = self._ahead.pop(0), self._compiling
        program = step.result()
        self._log.info(f"step {change.step}: continuing with model.moe.capacity_factor={change.factor}")
        self._log.write({"step": change.step, "capacity_factor": change.factor})
        self._compile_next()
        return program, evaluate

    def _compile_next(self) -> None:
        """Start compiling the programs of the next factor, if there is one."""
        if not self._ahead:
            return
        trainer, batch, target = self._ahead[0].trainer, self._batch_shape, self._target
        state = trainer.state_shapes
        pool = ThreadPoolExecutor(max_workers=1)
        self._compiling = [
            pool.submit(lambda: compiled(step_program(trainer, batch, target))),
            pool.submit(lambda: compiled(trainer.evaluate.lower(evaluated(state), batch, slots_of(state)))),
        ]
        pool.shutdown(wait=False)
