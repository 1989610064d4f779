"""Compilation of one training step for a target, in a process of its own: `python -m moe_jax.report.compile_step JOB`.

Compiling without the hardware requires environment variables that are set before jax starts, and the memory of the
compiler is freed when the process ends. JOB.json is the input; JOB.hlo and JOB.done.json are the results.
"""

import dataclasses
import functools
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.measure.targets import Target, find_target, target_devices
from moe_jax.measure.temporaries import compile_and_measure
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import make_mesh
from moe_jax.report.compiled import CompileError, Job, Outcome
from moe_jax.run.choose_grouped_matmul import is_timed
from moe_jax.run.tuning_space import config_of_first_step
from moe_jax.schedule.xla_flags import Value
from moe_jax.step.compile import StepProgram, batch_shape, step_program
from moe_jax.step.trainer import Trainer, make_trainer

# jax and the packages that contain the compiler
_PACKAGES = {
    "tpu": ("jax", "libtpu"),
    "gpu": ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    "cpu": ("jax", "jaxlib"),
}


def main() -> None:
    """Read the job, compile it, and write the program and the outcome."""
    stem = Path(sys.argv[1])
    job = Job(**json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")))
    text, outcome = compile_step(job)
    stem.with_suffix(".hlo").write_text(text, encoding="utf-8")
    stem.with_suffix(".done.json").write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")


def compile_step(job: Job) -> tuple[str, Outcome]:
    """Return the scheduled HLO and the outcome. Raises ConfigError, MeshError, TargetError, or CompileError."""
    target = find_target(job.target)
    config = load_config(job.config, job.overrides)
    mesh = make_mesh(config.mesh, devices_for(config, target))
    config = config_of_first_step(config, mesh)
    trainer = make_trainer(config, mesh)
    start = time.perf_counter()
    program = step_program(trainer, batch_shape(config, mesh), target, job.options)
    compiled, temporaries = compile_and_measure(
        functools.partial(_compile, program, target), target.platform, job.options
    )
    memory, compute = compiled.memory_analysis(), ComputeConfig.of(config, mesh)
    assert memory is not None, "every supported platform's compiler reports its memory"
    return compiled.as_text() or "", Outcome(
        num_devices=mesh.size,
        mesh={str(axis): size for axis, size in mesh.shape.items()},
        schedule=str(trainer.schedule) if trainer.schedule else None,
        compile_s=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=temporaries.num_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        versions=_versions(target),
        passes=_passes(trainer),
        fingerprint=program.fingerprint,
        exchanges_inside_nodes=compute.exchanges_inside_nodes,
        untimed_product=compute.grouped_product if is_timed(config, mesh) else None,
        profile_steps=config.schedule.profile_steps if target.platform == "gpu" else 0,
    )


def devices_for(config: Config, target: Target) -> list[Any]:
    """Return the devices of a target. Simulated ones start with the same flags as in a run. Raises TargetError."""
    if target.platform == "cpu":
        initialize(
            Processes(mode="off"),
            int(target.layout),
            in_background=config.may_wait_in_threads,
            quick_compile=config.train.quick_compile,
        )
    return target_devices(target)


def _passes(trainer: Trainer) -> dict[str, list[list[int]]] | None:
    pipeline = trainer.kind.pipeline
    return {name: runs.tolist() for name, runs in pipeline.pass_runs.items()} if pipeline else None


def _versions(target: Target) -> dict[str, str]:
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    return {name: found[name] for name in _PACKAGES[target.platform] if name in found}


def _compile(program: StepProgram, target: Target, options: Mapping[str, Value]) -> Any:
    try:
        return program.compile(options)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        cure = "use a smaller train.batch_size" if "RESOURCE_EXHAUSTED" in reason else "change the step or its options"
        raise CompileError(f"--compile {target.name}: the compiler refuses the step ({reason}): {cure}") from None


if __name__ == "__main__":
    run_command(main)
