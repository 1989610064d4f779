"""Training steps in one process of a network testbed: compiled, timed, traced, and profiled without communication."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import box
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.stages import Compiled
from no_comm_variants import collectives_of, communication, without_communication

from moe_jax.config import Config
from moe_jax.measure.trace import TracedOperation, joined, read_trace, seconds_by_op
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.measured import OPS, Seconds
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer

_RUNS = 3  # traces; shares of tasks are medians over them
_CLOCKED = 5  # step times are medians over so many means of `IN_A_ROW` steps
IN_A_ROW = 3  # steps that follow each other, as in training; after a barrier processes start at different times

Step = Callable[[], Any]  # runs one step; its result is ready when the step is done


class Harness:
    """The devices of one process, with one training state and one batch that all variants share."""

    def __init__(self, config: Config):
        self.config = config
        self.mesh = make_mesh(config.mesh)
        trainer = make_trainer(config, self.mesh)
        self.state = trainer.init()
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        shape = (config.train.batch_size, config.data.seq_len + 1)
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
        self.batch = jax.make_array_from_callback(shape, sharding, lambda index: tokens[index])

    def compiled(self, config: Config) -> Compiled:
        """Compile the training step of a config."""
        trainer = make_trainer(config, self.mesh)
        return step_program(trainer, self.batch, target_here(trainer)).compile()

    def step_of(self, program: Compiled) -> Step:
        """Return a function that runs a step from the state after the previous step."""

        def run() -> Any:
            self.state, metrics = program(self.state, self.batch)
            return metrics

        return run

    def communication(self, config: Config) -> Compiled:
        """Compile the collectives of a config's step as a program of their own."""
        trainer = make_trainer(config, self.mesh)
        traced = trainer.step.trace(trainer.state_shapes, self.batch)
        return communication(collectives_of(traced.jaxpr), self.mesh).lower().compile()


def seconds_per_step(step: Step, steps: int) -> float:
    """Return mean seconds of `steps` consecutive steps, after a barrier with the other processes."""
    multihost_utils.sync_global_devices("round")
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps


def print_once(line: str) -> None:
    """Print a line on process 0 only."""
    if box.rank() == 0:
        print(line, flush=True)


def traced(step: Step, program: Compiled) -> list[TracedOperation]:
    """Trace one step and return its operations with their times."""
    with tempfile.TemporaryDirectory() as folder:
        for phase in ("warm-up", "measured"):  # a step is slower while the profiler starts
            multihost_utils.sync_global_devices(phase)
            with jax.profiler.trace(Path(folder) / phase):
                jax.block_until_ready(step())
        return read_trace(Path(folder) / "measured", program.as_text() or "")


class Profile(NamedTuple):
    """Seconds of tasks without communication. They are those of the slowest process, since the others wait for it; or
    of the mean one, if collectives inside of tasks keep processes together.
    """

    tasks: Seconds
    rest_s: float  # outside of tasks
    step: Step  # compute alone, split into the first of the numbers of parts
    step_s: float


def profiled(harness: Harness, config: Config, parts: Sequence[int], keep: Axis | None = None) -> Profile:
    """Time a step split into each number of parts. Traces give the shares of tasks, the clock the total time.

    XLA's collectives over the axis `keep` are part of the tasks that have them, and those of few numbers of the rest.
    """
    steps, runs = {}, {}
    for count in parts:
        program = _without_communication(harness, config, count, keep)
        steps[count] = harness.step_of(program)
        kinds = config.model.block_kinds
        runs[count] = [_by_op(traced(steps[count], program), kinds) for _ in range(_RUNS)]
    alone = steps[parts[0]]
    if keep is not None:
        alone = harness.step_of(_without_communication(harness, config, parts[0]))
        seconds_per_step(alone, 1)
    # alternately, so that other load on the machine affects all of them alike
    clock = [{count: seconds_per_step(step, IN_A_ROW) for count, step in steps.items()} for _ in range(_CLOCKED)]
    alone_s = statistics.median(seconds_per_step(alone, 1) for _ in range(2 * _CLOCKED))
    found: dict[str, dict[int, dict[str, float]]] = {op: {} for op in OPS}
    rest_s = []
    for count, step_s in {count: statistics.median(times[count] for times in clock) for count in steps}.items():
        own = np.median(runs[count], axis=0)
        each = multihost_utils.process_allgather(np.float32(own * step_s / own.sum()))
        # processes that wait for each other inside of tasks take equally long together, each with its own waits
        shared = np.max(each, axis=0) if keep is None else np.mean(each, axis=0)
        # in the rest, those that are early wait for the last one
        rest_s.append(float((np.max if keep is None else np.min)(each[:, -1].sum(axis=-1))))
        for op, times in zip(OPS, shared.tolist(), strict=False):
            if any(times):
                found[op][count] = dict(zip("FBW", times, strict=True))
    return Profile(
        {op: at for op, at in found.items() if at},
        statistics.mean(rest_s),
        alone,
        float(np.max(multihost_utils.process_allgather(np.float32(alone_s)))),
    )


def _without_communication(harness: Harness, config: Config, parts: int, keep: Axis | None = None) -> Compiled:
    schedule = dataclasses.replace(
        config.schedule, policy="unified", microbatches=parts, weight_grad="greedy", grad_reduce="block"
    )
    with without_communication(keep):
        return harness.compiled(dataclasses.replace(config, schedule=schedule))


def _by_op(operations: Sequence[TracedOperation], kinds: Sequence[str]) -> list[list[float]]:
    """Return seconds of each op and direction; the last row is the time outside of tasks."""
    operations = [each._replace(communicates=False) for each in operations]  # those that are left are the tasks'
    found = seconds_by_op(operations, kinds)
    outside = [(each.start_s, each.end_s) for each in operations if not each.task]
    rest_s = sum(end - start for start, end in joined(outside))
    return [[found.get(op, {}).get(direction, 0.0) for direction in "FBW"] for op in OPS] + [[rest_s, 0.0, 0.0]]
