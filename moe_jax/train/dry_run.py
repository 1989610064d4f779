"""What a config would do here: mesh, parameters, memory and speed, without training or writing anything."""

import jax

from moe_jax.config import Config
from moe_jax.measure.peak import matrix_flops_per_s
from moe_jax.plan.resources import count_parameters, train_flops_per_token
from moe_jax.train.setup import compile_programs, open_run

_MIB = 2**20


def describe(config: Config) -> str:
    """A table as text. Compiles the step, so the memory is what the compiler allocates. Raises UserError."""
    run = open_run(config)
    memory = compile_programs(run).step.memory_analysis()
    assert memory is not None, "every supported platform's compiler reports its memory"
    counts = count_parameters(config.model)
    tokens = config.train.batch_size * config.data.seq_len
    flops = tokens * train_flops_per_token(config.model, config.data.seq_len)
    floor_s = flops / matrix_flops_per_s(config.train.compute_dtype)
    mesh = " × ".join(f"{axis}={size}" for axis, size in run.trainer.mesh.shape.items())
    rows = {
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind} in {jax.process_count()} process(es)",
        "mesh": mesh,
        "parameters": f"{counts.total:,} ({counts.active:,} active per token)",
        "blocks": " ".join(config.model.block_kinds),
        "schedule": f"{config.schedule.policy}, {config.schedule.microbatches} microbatch(es)",
        "tokens per step": f"{tokens:,} in {config.train.batch_size} sequences",
        "training tokens": f"{tokens * config.train.steps:,} in {config.train.steps:,} steps",
        "state per device": f"{memory.argument_size_in_bytes / _MIB:,.1f} MiB",
        "temporaries per device": f"{memory.temp_size_in_bytes / _MIB:,.1f} MiB",
        "step time": f"at least {floor_s:,.3g} s: {flops:.3g} FLOP at the matrix rate measured here",
        "starts at step": f"{run.first_step}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
