"""Loading parameters from a run's newest intact checkpoint, e.g. to generate text. Nothing on disk is changed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.files import FOLDER, DamagedError, steps_of
from moe_jax.checkpoint.latest import agreed_newest, agreed_record
from moe_jax.checkpoint.record import Record
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.processes import allgather
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.models.placement import slot_shapes
from moe_jax.paths import shown
from moe_jax.step.expert_placement import ordered, placement_shapes
from moe_jax.step.moving_average import AVERAGE

T = TypeVar("T")


def load_params(run: Path, params_shapes: Any, average: bool = False) -> Any:
    """Load the parameters of a run's newest intact checkpoint, with the shardings of `params_shapes`.

    With `average`, it is their moving average. Experts are in their original order, even if they had migrated. Damaged
    checkpoints are reported on stderr, and not moved. Raises CheckpointError if there is no intact checkpoint, and
    ConfigError if the run has no average.
    """
    return load_step(run, params_shapes, average)[1]


def load_step(run: Path, params_shapes: Any, average: bool = False, step: int | None = None) -> tuple[int, Any]:
    """Do the same for the checkpoint of a step, or the newest one, and also return its step.

    Raises CheckpointError also if there is no such step, or if it is damaged.
    """
    if average and load_config(run).optimizer.ema_decay is None:
        raise ConfigError(f"--ema: run {run} has optimizer.ema_decay=null, so no average: leave out --ema")
    damaged: dict[int, str] = {}
    part = AVERAGE if average else "params"
    if step is not None:
        return step, _params_of_step(run, step, params_shapes, part)
    found = read_newest(run, lambda record: (record.step, _params(run, record, params_shapes, part)), damaged)
    if found is None:
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    for step, reason in damaged.items():
        print(f"warning: {shown(damage_message(run, step, reason))}; using step {found[0]}", file=sys.stderr)
    return found


def read_newest(run: Path, read: Callable[[Record], T], damaged: dict[int, str]) -> T | None:
    """Return `read` of the newest intact checkpoint's record, or None if there are no checkpoints.

    `read` may raise DamagedError; then the next older one is tried. Damaged ones are added to `damaged`, with reasons.
    All processes call it. Raises CheckpointError if there are checkpoints and none is intact.
    """
    while (step := agreed_newest(run, damaged)) is not None:
        try:
            return read(agreed_record(run, step))
        except DamagedError as error:
            damaged[step] = str(error)
    return None


def _params_of_step(run: Path, step: int, params_shapes: Any, part: str) -> Any:
    steps = steps_of(run)
    if not all(allgather(step in steps)):
        there = f"name one of {', '.join(map(str, steps[::-1]))}" if steps else "train it first"
        raise CheckpointError(f"run {run} has no checkpoint of step {step}: {there}")
    try:
        return _params(run, agreed_record(run, step), params_shapes, part)
    except DamagedError as error:
        raise CheckpointError(f"{damage_message(run, step, str(error))}: name another step") from None


def _params(run: Path, record: Record, params_shapes: Any, part: str) -> Any:
    wanted = {part: params_shapes}
    if record.slots is None:
        return read_arrays(run, record, wanted)[part]
    stages = Stages.of(load_config(run))
    placement = placement_shapes(stages.model, record.slots, jax.tree.leaves(params_shapes)[0].sharding)
    wanted = slot_shapes(wanted, record.slots) | {"placement": placement}
    return ordered(read_arrays(run, record, wanted), wanted, stages)[part]


def damage_message(run: Path, step: int, reason: str) -> str:
    """Say which checkpoint is damaged, and why."""
    return f"checkpoint {run / FOLDER / str(step)} is damaged ({reason})"
