"""Compiler options that stop XLA from undoing a schedule, as plain data, each with its reason.

The effects were read off scheduled programs with jax 0.10.2 (`python -m moe_jax.report --compile`), of each generation
of TPUs in `profiling/results/same_program_*.json`. XLA reports an error for a flag that it does not know, so each set
holds only flags that its platform accepts, and a flag that older versions lack names the first jaxlib that has it.
"""

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import NamedTuple

from moe_jax.errors import ConfigError

Value = str | bool | int
Version = tuple[int, ...]


class Flag(NamedTuple):
    """One compiler option and the reason for it."""

    name: str
    value: Value
    reason: str
    since: Version = ()  # the first jaxlib that knows it; empty: every version that the project supports


_TPU = (
    Flag("xla_tpu_enable_async_all_to_all", "true", "a dense all-to-all is synchronous otherwise"),
    Flag("xla_tpu_force_async_all_to_all", "true", "with the one above alone, about half stay synchronous"),
    Flag("xla_tpu_enable_async_ragged_all_to_all", "true", "a ragged all-to-all is synchronous otherwise"),
    Flag("xla_jf_crs_combiner_threshold_in_bytes", "1", "all-reduces are merged into one after the step otherwise"),
)
_SPARSE_CORE = (
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        "true",
        "an all-reduce is synchronous on the TensorCore; on the SparseCore (v5p, v6e; tpu7x does it by itself) 9 of 10 "
        "chunks overlap with compute",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        "true",
        "as above, of sums that optimizer.zero scatters: all 53 of a step of 8 blocks have a start and a done",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        "true",
        "with the one above alone, a mesh axis that spans three dimensions of the torus (v5p) gets an all-reduce, of "
        "which each device then drops all but its shard: twice the traffic",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "true",
        "gathers of parameters are synchronous otherwise (optimizer.zero=3)",
    ),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
        "true",
        "with the one above alone, gathers over a mesh axis that spans two dimensions of the torus stay synchronous",
    ),
    Flag("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", "true", "as above, for three dimensions"),
    *(
        Flag(
            f"xla_tpu_sparse_core_{collective}_latency_multiplier",
            "2",
            "XLA's scheduler expects it to take about half as long as by the links' bandwidth, and hides only that",
        )
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    ),
)
_ALL_REDUCE_IN_FUSIONS = "an all-reduce is synchronous otherwise; in parts of fusions it overlaps with their products"
_FUSED = tuple(
    Flag(name, "true", _ALL_REDUCE_IN_FUSIONS)
    for name in (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_reduce",
    )
)
_NO_SPARSE_CORE = ("TPU v5 lite", "TPU v5e")  # jax's names of v5e
# XLA's own kernel for ragged all-to-alls writes into the other GPUs' memory. It is used inside a process alone, and was
# measured at 2 % of NVLink's rate: https://github.com/openxla/xla/issues/33386. Newer versions also use it between
# processes, where it crashes beyond 32 ranks: https://github.com/openxla/xla/issues/47283.
_GPU_RAGGED = (
    Flag(
        "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel",
        False,
        "a ragged all-to-all inside one process uses a slow kernel instead of NCCL otherwise",
    ),
    Flag(
        "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback",
        True,
        "a ragged all-to-all without that kernel is an error otherwise",
        since=(0, 11, 1),
    ),
)
_GPU = (
    Flag("xla_gpu_dot_merger_threshold_mb", 0, "microbatches' products are merged into one otherwise"),
    Flag("xla_gpu_all_reduce_combine_threshold_bytes", 0, "chunks of gradients are merged otherwise"),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", 0, "as above, for exchange.reduction=scatter_gather"),
    Flag("xla_gpu_all_gather_combine_threshold_bytes", 0, "as above, for exchange.reduction=scatter_gather"),
    Flag(
        "xla_gpu_collective_permute_combine_threshold_bytes",
        0,
        "a ring's keys are merged with sums that travel half a hop later otherwise, and what is left is synchronous",
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        2,
        "exchanges inside a node and sums between nodes wait for each other otherwise",
    ),
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,  # a bool: XLA:GPU takes no "true"
        "without it half of the ragged all-to-alls have nothing between start and done",
    ),
    *_GPU_RAGGED,
)
FLAGS: dict[str, tuple[Flag, ...]] = {"tpu": _TPU, "gpu": _GPU, "cpu": ()}
# how much of a device's memory XLA's scheduler may fill before it prefers what takes less to what hides communication
_MEMORY_PERCENT = {"tpu": "xla_tpu_scheduler_percent_shared_memory_limit", "gpu": "xla_gpu_memory_limit_slop_factor"}


def compiler_options(platform: str, device_kind: str, jaxlib: Version | None = None) -> dict[str, Value]:
    """Return the options for a platform (tpu, gpu or cpu) and a kind of device, as jax names it.

    Only options that a version of jaxlib knows are returned; None is the installed version. They are for
    `jax.jit(…, compiler_options=…)` or `lowered.compile(compiler_options=…)`.
    """
    flags = FLAGS[platform]
    if platform == "tpu":
        flags += _FUSED if device_kind in _NO_SPARSE_CORE else _SPARSE_CORE
    return _known(flags, jaxlib)


def ragged_options(platform: str, jaxlib: Version | None = None) -> dict[str, Value]:
    """Return those that every program with ragged all-to-alls needs, whether or not a schedule orders it."""
    return _known(_GPU_RAGGED if platform == "gpu" else (), jaxlib)


def _known(flags: Iterable[Flag], jaxlib: Version | None) -> dict[str, Value]:
    own = _installed() if jaxlib is None else jaxlib
    return {flag.name: flag.value for flag in flags if flag.since <= own}


def memory_option(percent: int | None, platform: str) -> dict[str, Value]:
    """Return the option for `schedule.memory_percent`. Raises ConfigError if the platform has none."""
    if percent is None:
        return {}
    if platform not in _MEMORY_PERCENT:
        raise ConfigError(
            f"schedule.memory_percent={percent} is for GPUs and TPUs, and these devices are {platform}: use "
            "schedule.memory_percent=null"
        )
    return {_MEMORY_PERCENT[platform]: percent}


def _installed() -> Version:
    """The version of the installed jaxlib. A development version counts as the one that it precedes."""
    numbers = re.match(r"[\d.]*\d", version("jaxlib"))
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
