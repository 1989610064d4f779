"""Check that a run fits in the memory of this machine, before XLA allocates it: XLA would abort the process."""

import os
from pathlib import Path

import jax

from moe_jax.errors import ConfigError
from moe_jax.models.transformer import ComputeConfig
from moe_jax.plan.memory import step_memory
from moe_jax.plan.memory_parts import StepMemory
from moe_jax.plan.units import size
from moe_jax.run.setup import Run

_TOO_HIGH = 1.35  # the most by which predictions have exceeded the allocated memory (docs/context.md)
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # memory limit of a container


def predicted_memory(run: Run) -> StepMemory:
    """The predicted memory of a step on each device."""
    mesh = run.trainer.mesh
    return step_memory(run.config, ComputeConfig.of(run.config, mesh).platform, mesh.shape)


def check_memory(run: Run) -> None:
    """Raise ConfigError if the CPU devices of this process certainly need more memory than the machine has."""
    available = machine_bytes()
    if jax.local_devices()[0].platform != "cpu" or available is None:
        return
    memory, devices = predicted_memory(run), jax.local_device_count()
    if devices * memory.total <= _TOO_HIGH * available:
        return
    if memory.state > memory.total / 2:
        cure = "use a smaller model, or cut it into more parts (mesh.expert, optimizer.zero=1) on the same devices"
    else:
        cure = "use a smaller train.batch_size or data.seq_len, more train.grad_accumulation, or schedule.remat=full"
    where = f"{devices} simulated devices" if devices > 1 else "one device"
    raise ConfigError(
        f"a step takes about {size(devices * memory.total)} on {where}, {size(devices * memory.state)} of it for "
        f"parameters and optimizer, and this machine has {size(available)}: {cure}"
    )


def machine_bytes() -> int | None:
    """The memory of this machine, or the limit of the container that this process is in; None if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        return min(total, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total
