"""A training step before it is compiled. Runs, reports, plans and benchmarks compile it here, and nowhere else.

The compiler's result depends on the program, on options and, on GPUs, on a profile. XLA:GPU's scheduler knows no times:
all fusions are equally long to it. So a scheduled step is compiled twice there, the second time with estimated times
of the first program's instructions as its profile (`measure/profile.py`). These follow from the program's text and from
published rates, so all processes of a run have the same.
"""

import dataclasses
import functools
import hashlib
import os
import socket
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from moe_jax.config import Config
from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.measure.hlo import parse
from moe_jax.measure.profile import estimated_profile
from moe_jax.measure.targets import Target, target_of
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.schedule.xla_flags import Value
from moe_jax.step.trainer import Trainer

_PROFILE = "fdo_profile"  # jax's name for the option
_PROFILE_FILE = "xla_gpu_pgle_profile_file_or_directory_path"  # XLA's flag for a profile that was measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """All that decides what a step is compiled to on given devices."""

    lowered: Lowered
    options: Mapping[str, Any]  # of the compiler
    target: Target | None  # by whose rates it is compiled a second time; None: it is compiled once
    num_devices: int

    def compile(self) -> Compiled:
        """Raises JaxRuntimeError if the compiler refuses it."""
        first = self.lowered.compile({**self.options})
        if self.target is None:
            return first
        profile = estimated_profile(parse(first.as_text() or ""), self.target, self.num_devices)
        with_profile: dict[str, Any] = {**self.options, _PROFILE: profile.encode()}
        return self.lowered.compile(with_profile)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same program, options and rates, whatever process, host or command made it."""
        rates = self.target and dataclasses.replace(self.target, name="")
        contents = (self.lowered.as_text(), sorted(self.options.items()), rates, self.num_devices)
        return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def step_program(
    trainer: Trainer, batch: Any, target: Target | None, options: Mapping[str, Value] | None = None
) -> StepProgram:
    """The step of a trainer, for a batch or its shape.

    `target` is what the mesh consists of, see `target_here`; only GPUs' rates are used. `options` replace the
    trainer's.
    """
    switch_off_pgle()
    chosen = {**trainer.options, **(options or {})}
    is_scheduled_gpu = trainer.kind.facts.orders_tasks and target is not None and target.platform == "gpu"
    return StepProgram(
        lowered=trainer.step.lower(*trainer.step_shapes(batch)),
        options=chosen,
        target=target if is_scheduled_gpu and not _has_profile(chosen) else None,
        num_devices=trainer.mesh.size,
    )


def target_here(trainer: Trainer) -> Target | None:
    """The GPUs of this run, for `step_program`; None for other devices, or if their rates are unknown, which is told.

    All processes call it.
    """
    devices = trainer.mesh.devices.flatten().tolist()
    if devices[0].platform != "gpu":
        return None
    target = target_of(devices, allgather(zlib.crc32(socket.gethostname().encode())))
    if not trainer.kind.facts.orders_tasks:
        return target
    if _has_profile({}):
        _print(f"XLA_FLAGS sets {_PROFILE_FILE}: the step is compiled by this profile, not by estimated times")
    elif target is None:
        _print(
            f"the rates of {devices[0].device_kind} are unknown: the step is compiled without estimated times of its "
            "instructions, which may expose more of its communication (docs/compiled.md)"
        )
    return target


def config_at(config: Config, step: int) -> Config:
    """The config with the capacity factor of a step (1 is the first)."""
    factors = [config.model.moe.capacity_factor]
    factors += [factor for first, factor in config.model.moe.capacity_schedule if first <= step]
    moe = dataclasses.replace(config.model.moe, capacity_factor=factors[-1], capacity_schedule=())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


def batch_shape(config: Config, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Of the global batch, with its sharding."""
    shape = (config.train.batch_size, config.data.seq_len + 1)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))


def switch_off_pgle() -> None:
    """Tell, once, that JAX_ENABLE_PGLE has no effect here.

    jax measures programs that it compiles when they are called, and those of a run are compiled ahead of time. Left on,
    it would still take CUDA graphs from every program that is compiled without a profile.
    """
    if not jax.config.jax_enable_pgle:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_enable_pgle", False)
    _print(
        "JAX_ENABLE_PGLE=true has no effect, as steps are compiled before they run: it is switched off "
        "(docs/compiled.md tells how to use a measured profile)"
    )


def _has_profile(options: Mapping[str, Value]) -> bool:
    return _PROFILE_FILE in options or _PROFILE_FILE in os.environ.get("XLA_FLAGS", "")


def _print(text: str) -> None:
    if is_main_process():
        print(text, flush=True)
