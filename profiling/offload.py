"""What do moments and activations in host memory save? python profiling/offload.py TARGET [section.key=value …]

Compiles steps of configs/bench/fine_grained.yaml with two data ranks, ahead of time and without the hardware, with
values on the device and in host memory: moments of a plain step of six blocks, and activations of a `unified` step of
twelve blocks. Both have one block in each iteration of a loop. Reads off the scheduled programs what the compiler
allocates, and which instructions copy between both memories: those with a start and a done are asynchronous. Targets:
v5p:2x2x2, h100:1x1x8, … Takes a few minutes for each program; `--of moments` compiles only these. Writes
results/offload_TARGET.json, and keeps the others.

jax knows no host memory of GPUs that are not there. So for GPUs the step is lowered for them on simulated CPU devices,
and then compiled for the target.
"""

import json
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client
from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.targets import Target, target_devices
from moe_jax.measure.temporaries import compile_and_measure
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.memory import step_memory
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.trainer import make_trainer

_CONFIG = "configs/bench/fine_grained.yaml"
_PLAIN = ["model.num_layers=6", "schedule.policy=vanilla", "schedule.microbatches=1"]
_PLAIN += ["schedule.weight_grad=inline", "schedule.grad_reduce=end", "schedule.bucket_cap_mb=null", "optimizer.zero=1"]
# of what is in host memory: the setting, and the step's settings
_OF = {
    "moments": ("optimizer.offload_moments", _PLAIN),
    "activations": ("schedule.offload_activations", ["model.num_layers=12", "optimizer.zero=1"]),
}
_COPY = re.compile(r" (copy|copy-start|dynamic-slice-start|dynamic-update-slice-start|fusion-start)\(")
_HOST = "S(5)"  # XLA's number of the memory


def compiled(config: Config, target: Target) -> tuple[str, Any, int]:
    """Compile the step; return its scheduled program, its memory, and the bytes of its temporaries."""
    devices = target_devices(target)
    if target.platform != "gpu":
        trainer = make_trainer(config, make_mesh(config.mesh, devices))
        program = step_program(trainer, batch_shape(config, trainer.mesh), target)
        step, temporaries = compile_and_measure(program.compile, target.platform)
        return step.as_text() or "", step.memory_analysis(), temporaries.num_bytes
    compute = ComputeConfig.of(config, make_mesh(config.mesh, devices))
    ComputeConfig.of = staticmethod(lambda *_: compute)  # type: ignore[method-assign,assignment]
    trainer = make_trainer(config, make_mesh(config.mesh, jax.devices()))
    traced = trainer.step.trace(*trainer.step_shapes(batch_shape(config, trainer.mesh)))
    lowered = traced.lower(lowering_platforms=("cuda",))
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=np.array([[each.id for each in devices]])
    )
    loaded = compiler.backend_compile_and_load(
        devices[0].client, lowered.compiler_ir(), xla_client.DeviceList(tuple(devices)), options, []
    )
    memory = loaded.get_compiled_memory_stats()
    return loaded.hlo_modules()[0].to_string(), memory, memory.temp_size_in_bytes


def row(config: Config, target: Target) -> dict[str, Any]:
    """Compile a step, and return what its program shows."""
    text, memory, temporaries = compiled(config, target)
    planned = step_memory(config, target.platform)
    result = memory.output_size_in_bytes - memory.alias_size_in_bytes
    lines = [line.partition(", metadata")[0] for line in text.splitlines() if _HOST in line]
    copies = Counter(found[1] for line in lines if (found := _COPY.search(line)))
    return {
        "arguments_gb": rounded(memory.argument_size_in_bytes / 1e9),
        "temporaries_gb": rounded(temporaries / 1e9),
        "allocated_gb": rounded((memory.argument_size_in_bytes + temporaries + result) / 1e9),
        "planned_gb": rounded(planned.total / 1e9),
        "host_gb": rounded(memory.host_argument_size_in_bytes / 1e9),
        "host_temporaries_gb": rounded(memory.host_temp_size_in_bytes / 1e9),
        "planned_host_gb": rounded((planned.on_host + planned.activations_on_host) / 1e9),
        "copies": dict(sorted(copies.items())),
    }


def main() -> None:
    """Compile each pair, and write results/offload_TARGET.json."""
    parser = CommandParser(prog="python profiling/offload.py", description=__doc__)
    parser.add_argument("--of", nargs="+", choices=_OF, default=list(_OF), help="default: both")
    arguments, target = read_command(parser, (), settings=True)
    if target.platform == "gpu":
        jax.config.update("jax_num_cpu_devices", math.prod(map(int, target.layout.split("x"))))
    ranks = math.prod(map(int, target.layout.split("x"))) // 2
    common = ["mesh.data=2", f"mesh.expert={ranks}", f"train.batch_size={4 * ranks}", "schedule.unroll=1"]
    stem = f"offload_{target.name.replace(':', '_')}"
    path = RESULTS / f"{stem}.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    for name in arguments.of:
        setting, own = _OF[name]
        settings = [*common, *own, *arguments.overrides]
        rows = {
            where: row(load_config(_CONFIG, [*settings, f"{setting}={is_offloaded}"]), target)
            for where, is_offloaded in (("host", "true"), ("device", "false"))
        }
        found[name] = {"settings": settings, **rows}
        write_result(stem, found)


if __name__ == "__main__":
    run_command(main)
