"""Ahead-of-time compilation of benchmark programs, without the hardware."""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from count_argument import check_least
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled
from results_file import rounded

from moe_jax.measure.hlo import HloModule, parse, without_frames
from moe_jax.measure.overlap import Replay
from moe_jax.measure.targets import ENVIRONMENT, Target, check_compiler, child_environment, find_target
from moe_jax.measure.temporaries import Temporaries, compile_and_measure
from moe_jax.schedule.xla_flags import Value, compiler_options


def read_command(
    parser: argparse.ArgumentParser, counts: Sequence[str], settings: bool = False
) -> tuple[argparse.Namespace, Target]:
    """Return the command line and its target; restarts the program in the environment that the target's compiler needs.

    Options named in `counts` are whole numbers from 1 up. With `settings`, the command line also has `overrides`.
    Raises UserError.
    """
    parser.add_argument("target")
    if settings:
        parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace others")
    arguments = parser.parse_intermixed_args()
    check_least(arguments, **dict.fromkeys(counts, 1))
    target = find_target(arguments.target)
    check_compiler(target)
    if not ENVIRONMENT[target.platform].items() <= os.environ.items():  # it must be set before jax starts
        os.execve(sys.executable, [sys.executable, *sys.argv], child_environment(target))
    return arguments, target


def program_hash(text: str) -> str:
    """Return a hash of all instructions of a scheduled program, without the lines of Python that they come from."""
    return hashlib.sha256(without_frames(text).encode()).hexdigest()


def times_ms(found: Replay) -> dict[str, Any]:
    """Return the estimated milliseconds of a replayed program."""
    seconds = {"step": found.step_s, "communication": found.communication_s, "exposed": found.exposed_s}
    return {f"{name}_ms": rounded(1e3 * each) for name, each in seconds.items()}


def row_dtype(platform: str) -> jnp.dtype[Any]:
    """Return the dtype that rows are computed in. XLA:CPU would send bfloat16 as float32."""
    return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


def compiled_on(
    mesh: Mesh, platform: str, body: Callable[..., Any], in_specs: Any, out_specs: Any, *shapes: Any
) -> tuple[Compiled, Temporaries]:
    """Compile a function of each device's shards of arrays with the training step's options."""
    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    lowered = jax.jit(on_mesh).trace(*shapes).lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
    options = compiler_options(platform, mesh.devices.flat[0].device_kind)

    def compile_with(further: Mapping[str, Value]) -> Compiled:
        return lowered.compile(compiler_options={**options, **further})

    return compile_and_measure(compile_with, platform)


def compile_on(
    mesh: Mesh, platform: str, body: Callable[..., jax.Array], spec: PartitionSpec, *shapes: Any
) -> HloModule:
    """Compile a function whose arrays and result are sharded by `spec`, and return its program."""
    program, _ = compiled_on(mesh, platform, body, spec, spec, *shapes)
    return parse(program.as_text() or "")
