"""Lower and compile a training step. Runs, reports, plans and benchmarks all compile steps with this module.

The result depends on the program, on the compiler's options and, on GPUs, on a profile. XLA:GPU's scheduler has no
instruction times of its own: it treats all fusions as equally long. So a scheduled step is compiled twice on GPUs, the
second time with estimated instruction times of the first program as its profile (`measure/profile.py`). The profile can
make a small step slower, so the program with the shorter estimated step is kept. The estimates follow from the
program's text and from published rates, so all processes of a run compute the same profile and keep the same program.

XLA:GPU's scheduler also stops hiding communication where its own estimate of the memory in use reaches 95 % of the
device's. It estimates more than is allocated: a step with 73.8 of 85 GB hid nothing, and with 76.6 GB a third, in 0.80
of the time. So steps are first compiled without this limit, and with it only if they do not fit.

A run may replace the estimates by measured times (`schedule.profile_steps`, `run/measured_profile.py`).
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from moe_jax.config import Config
from moe_jax.distributed.hosts import hosts
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import replay
from moe_jax.measure.profile import estimated_profile
from moe_jax.measure.targets import Target, target_of
from moe_jax.measure.temporaries import allocated_bytes
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.schedule.xla_flags import Value, memory_option
from moe_jax.step.trainer import Trainer

_PROFILE = "fdo_profile"  # jax's name for the option
_PROFILE_FILE = "xla_gpu_pgle_profile_file_or_directory_path"  # XLA's flag for a measured profile
_GRAPHS = "xla_gpu_enable_command_buffer"  # XLA's flag for the kernels that CUDA graphs launch
_UNLIMITED = memory_option(1000, "gpu")  # percent of the memory that XLA's scheduler may fill
_FILLED = 0.95  # of a device's memory, which is XLA's own limit
_SOURCE_LINES = "jax_traceback_in_locations_limit"  # jax's setting, and in capitals its environment variable


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """Everything that determines the compiled step on a set of devices."""

    lowered: Lowered
    options: Mapping[str, Any]  # compiler options
    target: Target | None  # its rates give the profile of the second compilation; None: compile once
    num_devices: int
    memory_bytes: int | None = None  # of a GPU; None: unknown, and XLA's scheduler keeps its own limit
    profile: str | None = None  # measured: compile once, with it

    def with_measured(self, profile: str) -> "StepProgram":
        """Return the program that is compiled by a measured profile instead of an estimated one."""
        return dataclasses.replace(self, profile=profile)

    @property
    def for_tracing(self) -> "StepProgram":
        """The same schedule without CUDA graphs, in which a profiler sees no instructions."""
        return dataclasses.replace(self, options={**self.options, _GRAPHS: ""})

    def compile(self, writes: Mapping[str, Any] | None = None) -> Compiled:
        """Compile the step, twice if it has a `target`, and return the program with the shorter estimated step.

        A measured profile replaces both compilations by one. If the device's memory is known and no limit is given, it
        is first compiled without one. `writes` are further options that change no program, such as where a dump goes.
        Raises JaxRuntimeError if the compiler rejects it.
        """
        options: dict[str, Any] = {**self.options, **(writes or {})}
        if self.memory_bytes is not None and not any(_is_set(options, flag) for flag in _UNLIMITED):
            program = self._fastest(options | _UNLIMITED)
            if allocated_bytes(program) <= _FILLED * self.memory_bytes:
                return program
        return self._fastest(options)

    def _fastest(self, options: Mapping[str, Any]) -> Compiled:
        """Compile with these options, and those of a profile."""
        options = dict(options)
        if self.profile is not None:
            return self.lowered.compile(options | {_PROFILE: self.profile.encode()})
        first = self.lowered.compile(options)
        if self.target is None:
            return first
        program = parse(first.as_text() or "")
        profile = estimated_profile(program, self.target, self.num_devices)
        second = self.lowered.compile(options | {_PROFILE: profile.encode()})
        first_s, second_s = (
            replay(each, self.target, self.num_devices).step_s for each in (program, parse(second.as_text() or ""))
        )
        return second if second_s <= first_s else first

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for equal programs, options and rates, in every process, host and command."""
        rates = self.target and dataclasses.replace(self.target, name="", memory_bytes=None)
        contents: tuple[Any, ...] = (self.lowered.as_text(), sorted(self.options.items()), rates, self.num_devices)
        if self.profile is not None:
            contents += (self.profile,)
        return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def step_program(
    trainer: Trainer, batch: Any, target: Target | None, options: Mapping[str, Value] | None = None
) -> StepProgram:
    """Return the program of a trainer's step for a batch or its shape.

    `target` describes the devices of the mesh, see `target_here`; only the rates of GPUs are used. `options` override
    the trainer's compiler options.
    """
    switch_off_pgle()
    chosen = {**trainer.options, **(options or {})}
    gpu = target if target is not None and target.platform == "gpu" else None
    with _without_source_lines():
        lowered = trainer.step.lower(*trainer.step_shapes(batch))
    return StepProgram(
        lowered=lowered,
        options=chosen,
        target=gpu if trainer.kind.facts.orders_tasks and not has_profile(chosen) else None,
        num_devices=trainer.mesh.size,
        memory_bytes=None if gpu is None else gpu.memory_bytes,
    )


@contextmanager
def _without_source_lines() -> Iterator[None]:
    """Lower without the lines of Python that each operation comes from, which take 9 % of XLA:TPU's time.

    Names of tasks stay. JAX_TRACEBACK_IN_LOCATIONS_LIMIT=10, jax's default, keeps the lines.
    """
    before = getattr(jax.config, _SOURCE_LINES)
    if _SOURCE_LINES.upper() not in os.environ:
        jax.config.update(_SOURCE_LINES, 0)
    try:
        yield
    finally:
        jax.config.update(_SOURCE_LINES, before)


def target_here(trainer: Trainer) -> Target | None:
    """Return the GPUs of this run as a target for `step_program`; all processes call it. Its memory is what jax has of
    process 0's first device.

    Returns None for other devices, and for GPUs with unknown rates, after printing a message.
    """
    devices = trainer.mesh.devices.flatten().tolist()
    if devices[0].platform != "gpu":
        return None
    target = target_of(devices, hosts())
    limit = from_process(0, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    if target is not None and limit:
        target = dataclasses.replace(target, memory_bytes=min(limit, target.memory_bytes or limit))
    if not trainer.kind.facts.orders_tasks:
        return target
    if has_profile({}):
        _print(f"XLA_FLAGS sets {_PROFILE_FILE}: the step is compiled by this profile, not by estimated times")
    elif target is None:
        _print(
            f"the rates of {devices[0].device_kind} are unknown: the step is compiled without estimated times of its "
            "instructions, which may expose more of its communication (docs/compiled.md)"
        )
    return target


def config_at(config: Config, step: int) -> Config:
    """Return the config with the capacity factor that step `step` uses; 1 is the first step."""
    factors = [config.model.moe.capacity_factor]
    factors += [factor for first, factor in config.model.moe.capacity_schedule if first <= step]
    moe = dataclasses.replace(config.model.moe, capacity_factor=factors[-1], capacity_schedule=())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


def batch_shape(config: Config, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape of the global batch, with its sharding."""
    shape = (config.train.batch_size, config.data.seq_len + 1)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))


def has_profile(options: Mapping[str, Value]) -> bool:
    """Return whether compiler options or XLA_FLAGS name a file with a profile."""
    return _is_set(options, _PROFILE_FILE)


def _is_set(options: Mapping[str, Value], flag: str) -> bool:
    return flag in options or flag in os.environ.get("XLA_FLAGS", "")


def switch_off_pgle() -> None:
    """Switch off JAX_ENABLE_PGLE, which has no effect here, and print a message once.

    jax profiles programs that it compiles when they are called, but the programs of a run are compiled ahead of time.
    If the option stayed on, jax would still disable CUDA graphs in every program that is compiled without a profile.
    """
    if not jax.config.jax_enable_pgle:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_enable_pgle", False)
    _print(
        "JAX_ENABLE_PGLE=true has no effect, as steps are compiled before they run: it is switched off "
        "(docs/compiled.md explains how to use a measured profile)"
    )


def _print(text: str) -> None:
    if is_main_process():
        print(text, flush=True)
