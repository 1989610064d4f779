"""A part of `bench_gpu.py`: our training step of one model on one device, timed, and traced by kinds of operations."""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpu_models import with_sequences
from jax.stages import Compiled
from parts import Put, Values, one_line
from results_file import quartiles, rounded
from roofline import seconds_by_kind, work_by_kind
from rounds import seconds_in_rounds

from moe_jax.config import Config
from moe_jax.errors import UserError
from moe_jax.measure.hlo import parse
from moe_jax.measure.trace import FILES, read_trace
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.clusters import cluster_of
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import step_memory
from moe_jax.plan.resources import count_parameters, train_flops_per_token
from moe_jax.run.choose_grouped_matmul import with_fastest_product
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer
from moe_jax.telemetry.energy import energy_counter

_SERIAL: dict[str, dict[str, str | bool]] = {
    "gpu": {"xla_gpu_enable_command_buffer": ""}
}  # kernels in a CUDA graph do not carry the names of instructions


def measure(put: Put, config: Config, rates: Values, clock_s: float, trace: Path) -> None:
    """Time steps for about `clock_s` seconds; halve the number of sequences whenever memory runs out."""
    sequences = config.train.batch_size
    while True:
        try:
            _measure(put, config, rates, clock_s, trace)
            break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or config.train.batch_size == 1:
                raise
            put({"no_room_for_sequences": config.train.batch_size, "because": one_line(error)})
        config = with_sequences(config, config.train.batch_size // 2)
    if config.train.batch_size == sequences:  # otherwise it would be that of the step that ran out of memory
        put({"peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")})


def _measure(put: Put, config: Config, rates: Values, clock_s: float, trace: Path) -> None:
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    config = with_fastest_product(config, mesh)  # as runs do
    shape = (config.train.batch_size, config.data.seq_len + 1)
    tokens = shape[0] * config.data.seq_len
    put(
        {
            "blocks": config.model.num_layers,
            "parameters": count_parameters(config.model).total,
            "sequences": shape[0],
            "sequence_tokens": config.data.seq_len,
            "capacity_factor": config.model.moe.capacity_factor,
            "grouped_product": config.train.grouped_product,
            "predicted_bytes": step_memory(config, rates["platform"]).total,
            "predicted_step_s": _predicted_step_s(config, rates["device"]),
        }
    )
    trainer = make_trainer(config, mesh)
    batch = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    start = time.perf_counter()
    program = step_program(trainer, batch, target_here(trainer)).compile()
    memory = program.memory_analysis()
    put({"compile_s": rounded(time.perf_counter() - start), "allocated_bytes": memory and _allocated(memory)})
    state, times, joules = _timed(program, trainer.init(), batch, clock_s)
    step_s = statistics.median(times)
    flops = train_flops_per_token(config.model, config.data.seq_len) * tokens
    put(
        {
            "step_s": quartiles(times),
            "tokens_per_s": rounded(tokens / step_s),
            "mfu": rounded(flops / step_s / rates["matrix_flops_per_s"]),
            "joules_per_token": None if joules is None else rounded(joules / tokens),
        }
    )
    try:
        if serial := _SERIAL.get(rates["platform"]):
            program = step_program(trainer, batch, target_here(trainer), serial).compile()
        put({"kinds": _kinds(program, state, batch, config, rates, trace)})
    except Exception as error:  # the timed results stay
        put({"failed": f"its trace: {one_line(error)}"})


def _allocated(memory: Any) -> int:
    """Return the allocated bytes as `plan.memory` counts them."""
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def _predicted_step_s(config: Config, device_kind: str) -> float | None:
    """Return the planner's time of a step by published rates; None if it does not know the device."""
    try:
        return rounded(estimate(config, cluster_of(device_kind, 1)).step_s)
    except UserError:
        return None


def _timed(program: Compiled, state: Any, batch: np.ndarray, clock_s: float) -> tuple[Any, list[float], float | None]:
    """Return the state after all steps, seconds per step in each round, and joules per step.

    The first steps are a warm-up. Joules are None if the device does not count them.
    """
    num_steps = 0

    def run(steps: int) -> float:
        nonlocal state, num_steps
        num_steps += steps
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / steps

    run(1)
    counter, num_steps = energy_counter(jax.devices()[:1]), 0
    before = counter() if counter else 0.0
    times = seconds_in_rounds(run, clock_s)
    return state, times, (counter() - before) / num_steps if counter else None


def _kinds(program: Compiled, state: Any, batch: np.ndarray, config: Config, rates: Values, trace: Path) -> Values:
    """Return seconds and lower bounds of each kind of operation in a traced step; save the trace in `trace`."""
    text = program.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        for phase in ("warm-up", "measured"):  # a step is slower while the profiler starts
            with jax.profiler.trace(Path(folder) / phase):
                state, metrics = program(state, batch)
                jax.block_until_ready(metrics)
        found = seconds_by_kind(read_trace(Path(folder) / "measured", text), parse(text))
        shutil.copyfile(next((Path(folder) / "measured").rglob(FILES)), trace)
    work = work_by_kind(config)
    least = {kind: work[kind].seconds(rates["matrix_flops_per_s"], rates["memory_bytes_per_s"]) for kind in work}
    return {
        kind: {
            "seconds": rounded(found.get(kind, 0.0)),
            "least_seconds": rounded(least[kind]),
            "flops": rounded(work[kind].flops),
            "bytes": rounded(work[kind].num_bytes),
        }
        for kind in work
    }
