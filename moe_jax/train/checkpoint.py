"""Checkpoints of a run: the training state and the data position, saved in the background by orbax."""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import CheckpointError, ConfigError, is_full_disk
from moe_jax.gate_table import gate_parameters
from moe_jax.models.placement import slot_shapes
from moe_jax.plan.plan_text import size
from moe_jax.stages import Stages
from moe_jax.train.checkpoint_files import FOLDER, first_line, newest_checkpoint, saved_slots
from moe_jax.train.placement import fits, ordered, placement_shapes, with_first_placement

# What a run cannot change while it goes on: what its parameters mean, and which tokens come next.
_FIXED = ("model.", "data.path", "data.seq_len", "train.seed", "train.batch_size")
_FREE = {
    "model.moe.capacity_factor",
    "model.moe.capacity_schedule",
    "model.moe.hooks",
    "model.moe.order",
    "model.moe.load_balance_weight",
    "model.moe.load_balance",
    "model.moe.router_z_weight",
    "model.moe.bias_update_rate",  # if both have a bias, or none
}


class Checkpoints:
    """The checkpoints below a run's folder. A context: leaving it waits for saves under way."""

    def __init__(self, run: Path, keep: int):
        self._manager = ocp.CheckpointManager(
            (run / FOLDER).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
        )
        self._run = run

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._manager.close()
        except Exception as problem:
            if error is None:  # or what ended the run is told
                raise self._not_saved(problem) from problem

    def save(self, step: int, state: Any, data_position: dict[str, Any]) -> None:
        """Start saving; the state may be donated as soon as this returns. A step that is saved already is kept.

        Raises CheckpointError if there is no room on the disk: now, or from here or on leaving if others fill it first.
        """
        if step == self._manager.latest_step():
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._manager.directory).free
        if free < needed:  # threads that run into it would each print a stack, and leave files
            raise self._no_room(f"checkpoint of step {step} takes {size(needed)}, and there are {size(free)} left")
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_position)),
            )
        except Exception as problem:  # of this save, or the one before
            raise self._not_saved(problem) from problem

    def _not_saved(self, problem: Exception) -> Exception:
        return self._no_room("last checkpoint found no room on the disk") if is_full_disk(problem) else problem

    def _no_room(self, told: str) -> CheckpointError:
        newest = newest_checkpoint(self._run)
        goes_on = "starts again" if newest is None else f"goes on from step {newest}"
        return CheckpointError(
            f"log.dir={self._run}: its {told}: make room, or use another log.dir; the same command then {goes_on}"
        )

    def resume(self, step: int, state_shapes: Any, config: Config) -> tuple[Any, dict[str, Any]]:
        """`restore`, whether experts migrated before and migrate now or not, and had copies or may have some.

        Raises CheckpointError.
        """
        sharding, migrates = state_shapes["step"].sharding, "placement" in state_shapes
        ranks, slots = config.mesh.expert_ranks(sharding.mesh.shape), saved_slots(self._run, step)
        in_order = {name: shapes for name, shapes in state_shapes.items() if name != "placement"}
        in_order = slot_shapes(in_order, config.model.moe.num_experts)
        if slots is None:
            state, data_position = self.restore(step, in_order)
        else:
            placement = placement_shapes(config.model, slots, sharding)
            state, data_position = self.restore(step, slot_shapes(in_order, slots) | {"placement": placement})
            if migrates and fits(state["placement"], config, ranks):
                return state, data_position
            state = ordered(state, state_shapes, Stages.of(config))
        return (with_first_placement(state, state_shapes, config, ranks) if migrates else state), data_position

    def restore(self, step: int, state_shapes: Any) -> tuple[Any, dict[str, Any]]:
        """State and data position of a step, placed as the shapes' shardings say. Raises CheckpointError."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(state_shapes), data=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=items)
        except Exception as error:  # orbax and its storage layer have no common error type
            raise _not_restored(self._run, step, error) from error
        return restored["state"], restored["data"]


def load_params(run: Path, params_shapes: Any) -> Any:
    """The parameters of a run's newest checkpoint, placed as the shapes' shardings say, experts in their order.

    Raises CheckpointError.
    """
    step = newest_checkpoint(run)
    if step is None:
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    path = run.absolute() / FOLDER / str(step) / "state"
    wanted = {"params": params_shapes}
    slots, stages = saved_slots(run, step), Stages.of(load_config(run))
    if slots is not None:
        placement = placement_shapes(stages.model, slots, jax.tree.leaves(params_shapes)[0].sharding)
        wanted = slot_shapes(wanted, slots) | {"placement": placement}
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
            found = checkpointer.restore(path, args)
            return (found if slots is None else ordered(found, wanted, stages))["params"]
    except Exception as error:  # orbax and its storage layer have no common error type
        raise _not_restored(run, step, error) from error


def check_same_run(config: Config, run: Path) -> None:
    """Raise CheckpointError unless the run's saved config has this config's model and order of data."""
    try:
        saved = load_config(run)
    except ConfigError as error:
        raise CheckpointError(
            f"log.dir={run} has checkpoints, but not the config of their model ({error}): use another log.dir"
        ) from None
    free = _FREE
    if gate_parameters(config.model) != gate_parameters(saved.model):
        free = free - {"model.moe.bias_update_rate"}
    for name, here, there in _differences(config, saved, ""):
        if name.startswith(_FIXED) and name not in free:
            raise CheckpointError(
                f"{name}={here}, but the checkpoints in log.dir={run} have {name}={there}: "
                f"use {name}={there}, or another log.dir"
            )
    if Stages.of(config).layout != Stages.of(saved).layout:
        here, there = (_stages_text(each) for each in (config, saved))
        raise CheckpointError(
            f"{here}, but the checkpoints in log.dir={run} hold blocks in the order of {there}: "
            f"use {there}, or another log.dir"
        )


def _stages_text(config: Config) -> str:
    settings = config.schedule
    head = f" and schedule.head_blocks={settings.head_blocks}" if settings.head_blocks else ""
    return f"mesh.pipeline={config.mesh.pipeline} with schedule.virtual_stages={settings.virtual_stages}{head}"


def _differences(here: Any, there: Any, name: str) -> list[tuple[str, Any, Any]]:
    if not hasattr(here, "__dataclass_fields__"):
        return [(name, here, there)] if here != there else []
    return [
        difference
        for field in here.__dataclass_fields__
        for difference in _differences(getattr(here, field), getattr(there, field), f"{name}.{field}".lstrip("."))
    ]


def _not_restored(run: Path, step: int, error: Exception) -> CheckpointError:
    folder, reason = run / FOLDER / str(step), first_line(error)
    if "TensorStore" in reason:  # where in which array, and the names of C++ functions
        reason = "some of its numbers cannot be read: files are damaged"
    return CheckpointError(
        f"checkpoint {folder} cannot be restored ({reason}): "
        "move that folder away to use the one before, or use another log.dir"
    )
