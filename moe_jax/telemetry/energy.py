"""Energy used by GPUs, from NVIDIA's management library (NVML)."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

Joules = Callable[[], float]  # energy used up to now by all GPUs of this process, since some fixed time


def energy_counter(devices: Sequence[jax.Device]) -> Joules | None:
    """An energy counter for these devices of this process.

    Returns None if they are not GPUs that count energy, or if `pynvml` is not installed. Also returns None if the host
    has GPUs of several models in CUDA's default order, as NVML's order of them is then unknown. CUDA_VISIBLE_DEVICES
    identifies the GPUs if it is set.
    """
    if any(device.platform != "gpu" for device in devices):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        if not _is_cuda_order(pynvml):
            return None
        handles = [_handle(pynvml, device.local_hardware_id) for device in devices]

        def joules() -> float:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3  # from mJ

        joules()
    except Exception:  # no package, an older GPU, or one not visible in a container: the run continues without energy
        return None
    return joules


def _is_cuda_order(pynvml: Any) -> bool:
    """Whether NVML and CUDA number the GPUs alike. By default CUDA puts the fastest GPU first."""
    names = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())}
    return len(names) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _handle(pynvml: Any, number: int) -> Any:
    """The NVML handle of the GPU with this number in the current process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[number].strip() if visible else str(number)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
