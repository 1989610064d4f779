"""Does a step of one long sequence run, and in how much memory? python profiling/long_sequence.py [LENGTH]

One block of a small model processes one sequence of 131,072 tokens (LENGTH), sharded over 8 simulated devices. Reports
the memory of a device's step with 1, 2, 4 and 8 context ranks, as compiled and as predicted, with ring attention and
with all keys and values gathered; then runs a step with the ring over 8 ranks. Writes results/long_sequence.json. Takes
ten minutes.
"""

import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from count_argument import count_argument
from jax.sharding import NamedSharding
from results_file import rounded, write_result

from moe_jax.config import (
    Config,
    DataConfig,
    ExchangeConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ScheduleConfig,
    TrainConfig,
)
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.memory import step_memory
from moe_jax.step.compile import step_program, target_here
from moe_jax.step.trainer import Trainer, make_trainer

DEVICES = 8
_MIB = 2**20


def config_of(length: int, context: int, form: Literal["ring", "all_gather"] = "ring") -> Config:
    """Return the config of one block of 8 experts that processes one sequence."""
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=32, capacity_factor=1.25)
    return Config(
        model=ModelConfig(
            vocab_size=256, hidden_size=32, num_layers=1, num_attention_heads=2, num_key_value_heads=1, moe=moe
        ),
        mesh=MeshConfig(data=1, context=context),
        schedule=ScheduleConfig(remat="full"),
        exchange=ExchangeConfig(context_form=form),
        data=DataConfig(seq_len=length),
        train=TrainConfig(batch_size=1, compute_dtype="float32"),
    )


class Step(NamedTuple):
    """A compiled step, with its config."""

    config: Config
    trainer: Trainer
    program: jax.stages.Compiled


def compiled(config: Config) -> Step:
    """Compile the step for as many devices as there are context ranks."""
    trainer = make_trainer(config, make_mesh(config.mesh, jax.devices()[: config.mesh.context]))
    sharding = NamedSharding(trainer.mesh, BATCH_SPEC)
    batch = jax.ShapeDtypeStruct((1, config.data.seq_len + 1), jnp.int32, sharding=sharding)
    return Step(config, trainer, step_program(trainer, batch, target_here(trainer)).compile())


def memory_mib(step: Step) -> dict[str, float]:
    """Return a device's memory without parameters and optimizer state, as compiled and as predicted, in MiB."""
    found, predicted = step.program.memory_analysis(), step_memory(step.config, "cpu")
    assert found is not None
    return {
        "temporaries_mib": rounded(found.temp_size_in_bytes / _MIB),
        "predicted_mib": rounded((predicted.total - predicted.state - predicted.batch) / _MIB),
    }


def run(step: Step) -> dict[str, float]:
    """Run the first step; return its loss and seconds."""
    tokens = np.random.default_rng(0).integers(64, size=(1, step.config.data.seq_len + 1), dtype=np.int32)
    batch = jax.device_put(tokens, NamedSharding(step.trainer.mesh, BATCH_SPEC))
    state = jax.block_until_ready(step.trainer.init())
    start = time.perf_counter()
    _, metrics = jax.block_until_ready(step.program(state, batch))
    return {"loss": rounded(float(metrics["cross_entropy"])), "step_s": rounded(time.perf_counter() - start)}


def main() -> None:
    """Compile, run and write results/long_sequence.json."""
    length = count_argument("LENGTH", 131072, __doc__)
    initialize(Processes(mode="off"), DEVICES)
    values: dict[str, Any] = {"length": length}
    for ranks in (1, 2, 4):
        values[f"ranks_{ranks}"] = memory_mib(compiled(config_of(length, ranks)))
    values[f"ranks_{DEVICES}_gathered"] = memory_mib(compiled(config_of(length, DEVICES, "all_gather")))
    ring = compiled(config_of(length, DEVICES))
    values[f"ranks_{DEVICES}"] = memory_mib(ring)
    write_result("long_sequence", values | run(ring))


if __name__ == "__main__":
    run_command(main)
