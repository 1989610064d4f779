"""Does compile time grow with depth? python profiling/compile_time.py [ROUNDS]

Traces and compiles the scheduled step of a small model with 4 and with 32 blocks, alternately, on 8 simulated devices,
and compares the memory of the deep one with that of the plain step, which scans its blocks. Takes about four minutes.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from count_argument import count_argument
from results_file import write_result

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, ScheduleConfig, TrainConfig
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import make_trainer

DEPTHS = (4, 32)
SCHEDULED: dict[str, Any] = {
    "policy": "unified",
    "microbatches": 2,
    "weight_grad": "greedy",
    "grad_reduce": "bucketed",
    "unroll": 2,
}
# On CPUs each of two microbatches has buffers for all slots, and so as many rows as the whole batch.
MEMORY = {
    "scheduled": SCHEDULED,
    "scheduled_uncut": SCHEDULED | {"policy": "vanilla", "microbatches": 1},
    "plain": {"unroll": SCHEDULED["unroll"]},
}
_MIB = 2**20


def config_of(num_layers: int, schedule: dict[str, Any]) -> Config:
    """Return a config with MoE blocks on a mesh of data=2, expert=4."""
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=128, moe_layer_freq=1, capacity_factor=1.25)
    return Config(
        model=ModelConfig(
            vocab_size=256, hidden_size=64, num_layers=num_layers, num_attention_heads=4, intermediate_size=128, moe=moe
        ),
        mesh=MeshConfig(data=2, expert=4),
        schedule=ScheduleConfig(**schedule),
        data=DataConfig(seq_len=64),
        train=TrainConfig(batch_size=32, compute_dtype="float32"),
    )


def compiled(config: Config) -> tuple[dict[str, float], jax.stages.Compiled]:
    """Compile the step of a model; return the CPU seconds of tracing and of compilation, and the program.

    CPU seconds are those of all threads of this process, so other load on the machine does not count.
    """
    jax.clear_caches()
    trainer = make_trainer(config, make_mesh(config.mesh))
    tokens = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), jnp.int32)
    start = time.process_time()
    source = step_program(trainer, tokens, target_here(trainer))
    between = time.process_time()
    program = source.compile()
    return {"trace_cpu_s": between - start, "compile_cpu_s": time.process_time() - between}, program


def temporary_mib(config: Config) -> float:
    """Return the memory of a device's step without parameters and optimizer state, in MiB."""
    memory = compiled(config)[1].memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes / _MIB


def main() -> None:
    """Measure and write results/compile_time.json."""
    rounds = count_argument("ROUNDS", 3, __doc__)
    initialize(Processes(mode="off"), 8)
    times: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
    for _ in range(rounds):
        for depth in DEPTHS:
            times[depth].append(compiled(config_of(depth, SCHEDULED))[0])
    values: dict[str, Any] = {"schedule": SCHEDULED, "rounds": rounds}
    for depth in DEPTHS:
        for name in ("trace_cpu_s", "compile_cpu_s"):
            values[f"{name}_{depth}_blocks"] = statistics.median(each[name] for each in times[depth])
    shallow, deep = ([sum(each.values()) for each in times[depth]] for depth in DEPTHS)
    ratios = [b / a for a, b in zip(shallow, deep, strict=True)]
    values |= {"deep_over_shallow": statistics.median(ratios), "ratios": sorted(ratios)}
    for name, schedule in MEMORY.items():
        values[f"temporary_mib_{name}"] = temporary_mib(config_of(DEPTHS[-1], schedule))
    write_result("compile_time", {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()})


if __name__ == "__main__":
    run_command(main)
