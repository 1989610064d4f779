"""Targets of ahead-of-time compilation: their names, published rates, and how to get a compiler for them without the
hardware.

Rates are peaks of one jax device, from `plan.clusters`. Links have a start-up time and bytes per second out of one
device, in one direction. For TPUs this is half of the published interconnect bandwidth: without wrap-around links, a
chip of a small slice has half of its neighbours.
"""

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_jax.config.attention_kernels import HOPPER
from moe_jax.config.ranges import SIMULATED, check_number
from moe_jax.errors import UserError
from moe_jax.plan.clusters import MOST_DEVICES, PRESETS, preset_of
from moe_jax.plan.clusters.hardware import RateShares
from moe_jax.plan.task_times import Linear


class TargetError(UserError):
    """The target is invalid, or its compiler is not available."""


_ALL_ALIKE = RateShares()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The hardware that a program is compiled for."""

    name: str  # v5p:2x2x2, h100:1x8x8, cpu:8
    platform: str  # tpu, gpu or cpu
    matrix_flops_per_s: float  # in bfloat16
    memory_bytes_per_s: float
    clock_hz: float | None  # for the cycles that the compiler estimates; None: no estimates
    link: Linear  # between devices, inside a node if there are nodes
    network: Linear  # between nodes
    node_devices: int | None  # None: no nodes, all devices share one kind of link
    rate_shares: RateShares = _ALL_ALIKE  # of products with other operands, relative to bfloat16
    memory_bytes: int | None = None  # of a device; None: unknown

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def layout(self) -> str:
        """Chips along each axis, or slices × hosts × GPUs."""
        return self.name.partition(":")[2]


def _of_cluster(name: str, platform: str) -> Target:
    """Return a target with the published peaks of the devices, and of the links of a small cluster of them."""
    kind, _, layout = name.partition(":")
    node = int(layout.rpartition("x")[2]) if platform == "gpu" else None
    preset = PRESETS[kind]
    # a host has four TPU chips
    count = max(preset.unit, node) if node else math.prod(map(int, layout.split("x"))) * preset.unit // 4
    device, (inside, *beyond) = preset.device, preset.levels(2 * count, count)
    link = Linear(_ALPHA_S, 1 / inside.bytes_per_s)
    # neither a slice of TPUs nor a rack whose trays NVLink joins has a network
    network = Linear(_ALPHA_S, 1 / beyond[0].bytes_per_s) if node and beyond else link
    products = _PRODUCTS_PER_CYCLE.get(kind)
    return Target(
        name=name,
        platform=platform,
        matrix_flops_per_s=device.matrix_flops_per_s,
        memory_bytes_per_s=device.memory_bytes_per_s,
        clock_hz=device.matrix_flops_per_s / (2 * products) if products else None,
        link=link,
        network=network,
        node_devices=node,
        rate_shares=device.rate_shares,
        memory_bytes=device.memory_bytes,
    )


def _cpu(name: str) -> Target:
    """Return a target of simulated devices. Its rates are round numbers: the program is real, its times are not."""
    link = Linear(_ALPHA_S, 1 / 1e9)
    return Target(
        name=name,
        platform="cpu",
        matrix_flops_per_s=1e11,
        memory_bytes_per_s=1e10,
        clock_hz=None,
        link=link,
        network=link,
        node_devices=None,
    )


_ALPHA_S = 5e-6  # start-up time of any collective
_MXU_128, _MXU_256 = 128 * 128, 256 * 256
# Multiply-adds per cycle in a device's matrix units.
_PRODUCTS_PER_CYCLE = {
    "v4": 8 * _MXU_128,
    "v5e": 4 * _MXU_128,
    "v5p": 8 * _MXU_128,
    "v6e": 4 * _MXU_256,
    "tpu7x": 4 * _MXU_256,
}
_KINDS = (*_PRODUCTS_PER_CYCLE, "h100", "h200", "cpu")  # with a compiler
_MOST_DIGITS = 9  # more devices than any machine can simulate
_FORMS = {"tpu": r"\d+(x\d+){1,2}", "gpu": r"\d+x\d+x\d+", "cpu": r"\d+"}
_EXAMPLES = {"tpu": "2x2x2", "gpu": "1x8x8 (slices × hosts × GPUs per host)", "cpu": "8"}

# Lets the compilers run without their hardware; must be set before jax starts.
ENVIRONMENT: dict[str, Mapping[str, str]] = {
    "tpu": {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",  # of the assumed host; the topology is requested by name
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "gpu": {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    "cpu": {"JAX_PLATFORMS": "cpu"},
}
_COMPILERS = {
    "tpu": (("libtpu",), "libtpu", "tpu"),
    "gpu": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "jax's CUDA plugin", "cuda"),
}


def find_target(name: str) -> Target:
    """Return the target with a name. Raises TargetError."""
    kind, _, layout = name.partition(":")
    if kind not in _KINDS:
        raise TargetError(f"--compile {name}: {kind!r} is unknown: use one of {', '.join(_KINDS)}, as in v5p:2x2x2")
    platform = "cpu" if kind == "cpu" else PRESETS[kind].device.platform
    if not re.fullmatch(_FORMS[platform], layout, re.ASCII):
        raise TargetError(f"--compile {name}: {layout!r} is no layout of {kind}: write {kind}:{_EXAMPLES[platform]}")
    if platform == "cpu":
        check_number(f"--compile {name}: devices", int(layout[:_MOST_DIGITS]), SIMULATED)
        return _cpu(name)
    counts = [int(number[:_MOST_DIGITS]) for number in layout.split("x")]
    if 0 in counts:
        possible = "x".join(str(max(count, 1)) for count in counts)
        raise TargetError(f"--compile {name} has no devices: use 1 or more along each axis, as in {kind}:{possible}")
    if math.prod(counts) > MOST_DEVICES:
        raise TargetError(f"--compile {name} has too many devices: use up to {MOST_DEVICES:,}")
    return _of_cluster(name, platform)


def target_of(devices: Sequence[Any], hosts: Sequence[int]) -> Target | None:
    """Return a target for the GPUs that jax has, with the published rates of their kind; None if those are unknown.

    `hosts` has a number for the host of each process. If there are several slices (devices that jax considers connected
    by fast links), a node is a slice, else a host.
    """
    kind = preset_of(devices[0].device_kind)
    if kind is None or PRESETS[kind].device.platform != "gpu":
        return None
    slices = [getattr(device, "slice_index", 0) for device in devices]
    nodes = slices if len(set(slices)) > 1 else [hosts[device.process_index] for device in devices]
    of_node = min(Counter(nodes).values())
    return _of_cluster(f"{kind}:1x{len(devices) // of_node}x{of_node}", "gpu")


def check_compiler(target: Target) -> None:
    """Raise TargetError unless the compiler for a target is installed."""
    if target.platform not in _COMPILERS:
        return
    modules, name, extra = _COMPILERS[target.platform]
    if not any(map(_is_installed, modules)):
        raise TargetError(f"--compile {target.name} needs {name}, which is not installed: pip install -e '.[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing, too
        return False


def target_devices(target: Target) -> list[Any]:
    """Return the jax devices for a mesh. Raises TargetError. `ENVIRONMENT` must be set before jax is imported."""
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", int(target.layout))
        return jax.devices()
    if target.platform == "gpu":
        _assume_hopper()
    try:
        if target.platform == "tpu":
            chip = {"chip_config_name": "megacore"} if target.kind == "v4" else {}  # otherwise devices are cores
            return topologies.get_topology_desc(topology_name=target.name, platform="tpu", **chip).devices
        return topologies.get_topology_desc(
            topology_name=target.kind,
            platform="cuda",
            target_config=_GPU_CONFIG.format(
                name=target.kind.upper(),
                memory_bandwidth=_GPU_BANDWIDTH[target.kind],
                device_memory_size=PRESETS[target.kind].device.memory_bytes,
            ),
            topology=target.layout,
        ).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TargetError(f"--compile {target.name}: the compiler refuses it ({reason}): use another layout") from None


def _assume_hopper() -> None:
    """Make jax assume a Hopper GPU. Otherwise it asks a GPU of this machine, which has none, what cuDNN attention
    supports.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    attention.check_compute_capability = lambda needed: tuple(map(int, needed.split("."))) <= HOPPER


_GPU_BANDWIDTH = {"h100": 3352320000000, "h200": 4814208000000}  # exact, unlike in data sheets
# A Hopper SXM GPU, as in XLA's own target descriptions.
_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {memory_bandwidth} device_memory_size: {device_memory_size}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 10 }}
"""


def child_environment(target: Target) -> dict[str, str]:
    """Return the environment in which a target's compiler runs."""
    return {**os.environ, **ENVIRONMENT[target.platform]}
