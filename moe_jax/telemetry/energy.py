"""Energy that GPUs have used, as NVIDIA's management library counts it."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

Joules = Callable[[], float]  # used up to now, by the GPUs of this process together


def energy_counter(devices: Sequence[jax.Device]) -> Joules | None:
    """A counter for these devices of this process; None where they are no GPUs that count, or without `pynvml`.

    None, too, of unlike GPUs in CUDA's own order, which cannot be told from here.

    CUDA_VISIBLE_DEVICES says which GPUs they are, if it is set.
    """
    if any(device.platform != "gpu" for device in devices):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        if not _are_as_cuda_counts(pynvml):
            return None
        handles = [_handle(pynvml, device.local_hardware_id) for device in devices]

        def joules() -> float:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3  # of millijoules

        joules()
    except Exception:  # no package, an older GPU, or one that a container does not show: a run goes on without
        return None
    return joules


def _are_as_cuda_counts(pynvml: Any) -> bool:
    """Whether both give GPUs the same numbers: CUDA begins with the fastest, unless it is told not to."""
    names = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())}
    return len(names) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _handle(pynvml: Any, number: int) -> Any:
    """Of the GPU that this process knows by a number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[number].strip() if visible else str(number)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
