"""Parameters of a run's newest checkpoint that is whole, for whoever reads them; nothing is changed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.files import FOLDER, DamagedError
from moe_jax.checkpoint.latest import agreed_newest, agreed_record
from moe_jax.checkpoint.record import Record
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CheckpointError
from moe_jax.models.placement import slot_shapes
from moe_jax.step.expert_placement import ordered, placement_shapes

T = TypeVar("T")


def load_params(run: Path, params_shapes: Any) -> Any:
    """The parameters of a run's newest whole checkpoint, placed as the shapes' shardings say, experts in their order.

    Damaged ones are told and stay where they are. Raises CheckpointError.
    """
    damaged: dict[int, str] = {}
    found = read_newest(run, lambda record: (record.step, _params(run, record, params_shapes)), damaged)
    if found is None:
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    for step, reason in damaged.items():
        print(f"warning: {told(run, step, reason)}; using step {found[0]}", file=sys.stderr)
    return found[1]


def read_newest(run: Path, read: Callable[[Record], T], damaged: dict[int, str]) -> T | None:
    """What `read` makes of the newest checkpoint that is whole, or None without any; others are noted in `damaged`.

    All processes call it. Raises CheckpointError if there are checkpoints and none is whole.
    """
    while (step := agreed_newest(run, damaged)) is not None:
        try:
            return read(agreed_record(run, step))
        except DamagedError as error:
            damaged[step] = str(error)
    return None


def _params(run: Path, record: Record, params_shapes: Any) -> Any:
    wanted = {"params": params_shapes}
    if record.slots is None:
        return read_arrays(run, record, wanted)["params"]
    stages = Stages.of(load_config(run))
    placement = placement_shapes(stages.model, record.slots, jax.tree.leaves(params_shapes)[0].sharding)
    wanted = slot_shapes(wanted, record.slots) | {"placement": placement}
    return ordered(read_arrays(run, record, wanted), wanted, stages)["params"]


def told(run: Path, step: int, reason: str) -> str:
    """That a checkpoint is damaged."""
    return f"checkpoint {run / FOLDER / str(step)} is damaged ({reason})"
