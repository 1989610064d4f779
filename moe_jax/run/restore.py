"""Resuming a run from its newest intact checkpoint or safety copies; newer, damaged checkpoints are quarantined."""

from collections.abc import Mapping

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.compatibility import check_same_model, renamed_sources
from moe_jax.checkpoint.files import DamagedError, quarantine
from moe_jax.checkpoint.latest import agreed_record
from moe_jax.checkpoint.load import damage_message
from moe_jax.checkpoint.record import Record, Restored
from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.errors import CheckpointError
from moe_jax.models.placement import slot_shapes
from moe_jax.paths import shown
from moe_jax.run.identity import check_text
from moe_jax.run.restore_from_replicas import restore_from_replicas
from moe_jax.run.setup import Run, open_run
from moe_jax.step.expert_placement import fits, ordered, placement_shapes, with_first_placement


def restore_latest(config: Config, run: Run) -> tuple[Run, Restored | None]:
    """Restore the state from a run's newest safety copies or checkpoint; None if there are none.

    Also returns the run, opened again if it resumes at another step than that of its newest checkpoint. All processes
    call it. Raises CheckpointError if there are checkpoints but none is intact, or if one is of another model; then
    none is moved.
    """
    replicas = restore_from_replicas(config, run)
    if isinstance(replicas, Restored):
        _check_text(run, replicas.record)
        run = open_run(config, run.damaged, replicas.record.step)
        _quarantine_all(run, run.damaged)
        return run, replicas
    run, restored = _restore_checkpoint(config, run)
    if restored:
        return run, restored._replace(source=f"from the checkpoint, as {replicas}" if replicas else "")
    if replicas and is_main_process():
        print(f"beginning at step 0, as {replicas}", flush=True)
    return run, None


def _restore_checkpoint(config: Config, run: Run) -> tuple[Run, Restored | None]:
    """Restore the newest intact checkpoint, and quarantine newer ones. Raises CheckpointError."""
    damaged = dict(run.damaged)
    while run.first_step:
        try:
            restored = _restore(run)
        except DamagedError as error:
            damaged[run.first_step] = str(error)
            run = open_run(config, damaged)
        else:
            _quarantine_all(run, damaged)
            return run, restored
    return run, None


def _restore(run: Run) -> Restored:
    """Restore the checkpoint of step `run.first_step`.

    The settings of migration and replicas of experts may have changed: experts are reordered accordingly. Raises
    DamagedError and CheckpointError.
    """
    shapes, config = run.trainer.state_shapes, run.config
    record = agreed_record(run.folder, run.first_step)
    check_same_model(config, record.config, run.folder, record.step)
    _check_text(run, record)
    sharding, slots = shapes["step"].sharding, record.slots
    ranks = config.mesh.expert_ranks(sharding.mesh.shape)
    if slots is not None and slots % ranks:
        raise CheckpointError(
            f"mesh: {ranks} expert ranks cannot share the {slots} positions that experts and their copies have in "
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


def _check_text(run: Run, record: Record) -> None:
    """Raise CheckpointError if a record is of other training data; prints a warning if that is not known, or if a
    source has another name.
    """
    unknown = check_text(run.identity, record, run.folder, run.config.data)
    for text in filter(None, (unknown, renamed_sources(run.config, record.config))):
        if is_main_process():
            print(f"warning: {text}", flush=True)


def _quarantine_all(run: Run, damaged: Mapping[int, str]) -> None:
    """Move damaged checkpoints away, with a warning for each. Returns when process 0 has moved them."""
    if is_main_process():
        for step, reason in damaged.items():
            moved = quarantine(run.folder, step, reason)
            text = damage_message(run.folder, step, reason)
            print(f"warning: {shown(text)}: moved to {moved}, resuming from step {run.first_step}", flush=True)
    allgather(0)  # a barrier
