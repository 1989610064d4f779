"""Where a run goes on: at the newest checkpoint that is what was saved; damaged ones newer than it are put aside."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import CheckpointError
from moe_jax.models.placement import slot_shapes
from moe_jax.stages import Stages
from moe_jax.train.checkpoint_arrays import read_arrays
from moe_jax.train.checkpoint_files import FOLDER, DamagedError, check_files, newest_checkpoint
from moe_jax.train.checkpoint_record import Record
from moe_jax.train.placement import fits, ordered, placement_shapes, with_first_placement
from moe_jax.train.processes import allgather, is_main_process
from moe_jax.train.quarantine import quarantine
from moe_jax.train.same_run import check_same_model
from moe_jax.train.setup import Run, open_run
from moe_jax.train.step import State

T = TypeVar("T")


class Restored(NamedTuple):
    """What a run goes on with."""

    state: State
    record: Record


def restore_newest(config: Config, run: Run) -> tuple[Run, Restored | None]:
    """The state of a run's newest checkpoint, if it has one; the run is another if it has to go on before that.

    All processes call it. Raises CheckpointError if there are checkpoints and none is whole, or if one is of another
    model; then none is moved.
    """
    damaged = dict(run.damaged)
    while run.first_step:
        try:
            restored = _restore(run)
        except DamagedError as error:
            damaged[run.first_step] = str(error)
            run = open_run(config, damaged)
        else:
            _put_aside(run, damaged)
            return run, restored
    return run, None


def load_params(run: Path, params_shapes: Any) -> Any:
    """The parameters of a run's newest whole checkpoint, placed as the shapes' shardings say, experts in their order.

    Damaged ones are told and stay where they are. Raises CheckpointError.
    """
    damaged: dict[int, str] = {}
    found = read_newest(run, lambda record: (record.step, _params(run, record, params_shapes)), damaged)
    if found is None:
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    for step, reason in damaged.items():
        print(f"warning: {_told(run, step, reason)}; using step {found[0]}", file=sys.stderr)
    return found[1]


def read_newest(run: Path, read: Callable[[Record], T], damaged: dict[int, str]) -> T | None:
    """What `read` makes of the newest checkpoint that is whole, or None without any; others are noted in `damaged`.

    Raises CheckpointError if there are checkpoints and none is whole.
    """
    while (step := newest_checkpoint(run, damaged)) is not None:
        try:
            return read(check_files(run, step))
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


def _restore(run: Run) -> Restored:
    """Whether experts migrated before and migrate now or not, and had copies or may have some.

    Raises DamagedError and CheckpointError.
    """
    record, shapes, config = _agreed_record(run), run.trainer.state_shapes, run.config
    check_same_model(config, record.config, run.folder, record.step)
    sharding, slots = shapes["step"].sharding, record.slots
    ranks = config.mesh.expert_ranks(sharding.mesh.shape)
    if slots is not None and slots % ranks:
        raise CheckpointError(
            f"mesh: {ranks} expert ranks cannot share the {slots} slots that experts and their copies have in "
            f"log.dir={run.folder}: use a mesh whose expert ranks divide {slots}, or another log.dir"
        )
    saved = slot_shapes(
        {name: shape for name, shape in shapes.items() if name != "placement"}, slots or config.model.moe.num_experts
    )
    if slots is not None:
        saved["placement"] = placement_shapes(config.model, slots, sharding)
    state = read_arrays(run.folder, record, saved)
    if int(state["step"]) != record.step:
        raise DamagedError(f"its state is of step {int(state['step'])}")
    migrates = "placement" in shapes
    if slots is not None and not (migrates and fits(state["placement"], config, ranks)):
        state = ordered(state, shapes, Stages.of(config))
    if migrates and "placement" not in state:
        state = with_first_placement(state, shapes, config, ranks)
    return Restored(state, record)


def _agreed_record(run: Run) -> Record:
    """Raises DamagedError on all processes if one of them cannot read it."""
    record, problem = None, "another process cannot read it"
    try:
        record = check_files(run.folder, run.first_step)
    except DamagedError as error:
        problem = str(error)
    if any(allgather(record is None)) or record is None:
        raise DamagedError(problem)
    return record


def _put_aside(run: Run, damaged: Mapping[int, str]) -> None:
    if is_main_process():
        for step, reason in damaged.items():
            moved = quarantine(run.folder, step, reason)
            told = _told(run.folder, step, reason)
            print(f"warning: {told}: moved to {moved}, going on from step {run.first_step}", flush=True)
    allgather(0)  # until they are out of the way, for all processes


def _told(run: Path, step: int, reason: str) -> str:
    return f"checkpoint {run / FOLDER / str(step)} is damaged ({reason})"
