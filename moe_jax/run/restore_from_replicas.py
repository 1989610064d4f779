"""Resuming from safety copies: all processes agree on the newest step of which every piece exists somewhere.

P is the number of processes, N the number of pieces of the state.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool
from numpy.typing import NDArray

from moe_jax.checkpoint.arrays import array_records
from moe_jax.checkpoint.checksums import digest_program, names_of
from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.record import Record, Restored
from moe_jax.checkpoint.replicas.files import ReplicaFile, whole_slots
from moe_jax.checkpoint.replicas.layout import ReplicaLayout, lost_owners, piece_name, piece_sources, replacements
from moe_jax.checkpoint.replicas.plan import SafetyPlan, index_of
from moe_jax.config import Config
from moe_jax.distributed.processes import allgather, allgather_rows, from_process
from moe_jax.errors import CheckpointError
from moe_jax.files.untrusted import read_text
from moe_jax.parallel.p2p_copy import by_device, checksum_words
from moe_jax.run.run_dir import steps_in_records
from moe_jax.run.setup import Run, record_facts
from moe_jax.step.context import State

RUN_ID = "run_id"  # file with a number that distinguishes a run's copies from those of earlier runs in the same folder
_MAX_WORDS = 2**22  # of 4 bytes, sent at once
_MAX_VERSIONS = 8  # on one node

# why there are no usable copies; if there are several reasons, the last of them is reported
_REASONS = (
    "there are no safety copies",
    "safety copies are not newer",
    "safety copies are of another mesh, or cut otherwise",
)
_NONE, _NOT_NEWER, _OTHER_MESH = range(len(_REASONS))


class Version(NamedTuple):
    """Identifies copies of one step. If a step was repeated, its copies may have several versions."""

    step: int
    checksum: int  # of the record


def _read_run_id(folder: Path) -> int:
    """The ID of safety copies in a run's folder, as read by process 0; 0 if there is none. All processes call it."""
    try:
        number = int(read_text(folder / RUN_ID))
    except (OSError, ValueError):
        number = 0
    return allgather(number)[0]


def restore_from_replicas(config: Config, run: Run) -> Restored | str:
    """The state from the newest complete safety copies that are newer than all checkpoints, or why there is none.

    The reason is empty if the run makes no copies. All processes call it. Raises MetricsError.
    """
    plan = run.safety
    if plan is None or not (run_id := _read_run_id(run.folder)):
        return ""
    recorded = steps_in_records(run.folder)
    slots, reason = _usable(run, plan, run_id, recorded.last)
    problem = _REASONS[max(allgather(reason))]
    try:
        check_same_run(config, run.folder)
        is_same = True
    except CheckpointError:
        is_same = False
    if not all(allgather(is_same)):
        return "safety copies are of other settings"
    for version in _versions(slots):
        here = slots.get(version, [])
        available_PN = _available(plan.layout, here)
        sources = piece_sources(available_PN, plan.layout)
        if lost := lost_owners(sources, plan.layout):
            problem = f"no safety copy is left of the shards of process {_listed(lost)}"
            continue
        source = int(np.argmax(available_PN.any(axis=1)))
        record = Record.from_json(from_process(source, here[0].record.to_json() if here else None))
        state = _state(run, plan.layout, record, here, available_PN, sources)
        if state is None:
            problem = f"safety copies of step {version.step} are damaged"
            continue
        owners = replacements(available_PN, sources, plan.layout)
        origin = ", ".join(f"owner {owner}'s from process {_listed(there)}" for owner, there in owners.items())
        return Restored(
            state=state,
            record=record,
            run_id=run_id,
            files=frozenset(slot.path for slot in here),
            is_validated=version.step in recorded.validated,
            source=f"from safety copies ({origin})" if origin else "from safety copies",
        )
    return problem


def _usable(run: Run, plan: SafetyPlan, run_id: int, recorded: int) -> tuple[dict[Version, list[ReplicaFile]], int]:
    """The usable copies on this node, by version, and the reason (an index of _REASONS) for skipping others.

    `recorded` is the last step in metrics.jsonl.
    """
    found, reason = defaultdict(list), _NONE
    shapes, mesh = run.trainer.state_shapes, record_facts(run)["mesh"]
    arrays = {name: (x.shape, str(x.dtype)) for name, x in zip(names_of(shapes), jax.tree.leaves(shapes), strict=True)}
    pieces = {piece.name for piece in plan.layout.pieces}
    for slot in whole_slots(plan.own_folder):
        record = slot.record
        same = {name: (leaf.shape, leaf.dtype) for name, leaf in record.leaves.items()} == arrays
        if slot.run != run_id or (slot.is_recorded and record.step > recorded):  # else metrics would lack its record
            continue
        if record.mesh != mesh or not same or not slot.offsets.keys() <= pieces:
            reason = _OTHER_MESH
        elif not run.first_step < record.step <= run.config.train.steps:
            reason = max(reason, _NOT_NEWER)
        else:
            found[Version(record.step, slot.checksum)].append(slot)
    return dict(found), reason


def _versions(slots: Mapping[Version, Any]) -> list[Version]:
    """The versions on all nodes, newest first."""
    own = np.zeros((_MAX_VERSIONS, 2), np.uint32)
    for row, version in zip(own, sorted(slots, reverse=True), strict=False):
        row[:] = version
    found = {Version(*row) for row in allgather_rows(own).reshape(-1, 2).tolist()}
    return sorted((version for version in found if version.step), reverse=True)


def _available(layout: ReplicaLayout, slots: Sequence[ReplicaFile]) -> Bool[np.ndarray, "P N"]:
    """Which process has which pieces; `slots` are those of this process."""
    own = [any(piece.name in slot.offsets for slot in slots) for piece in layout.pieces]
    return allgather_rows(np.array(own))


def _state(
    run: Run,
    layout: ReplicaLayout,
    record: Record,
    slots: Sequence[ReplicaFile],
    available_PN: Bool[np.ndarray, "P N"],
    sources: Sequence[int | None],
) -> State | None:
    """The state from the pieces in slots of all processes; None if its checksums are not those of the record.

    Process `sources[n]` sends piece n to the owners that lack it.
    """
    process, pieces = jax.process_index(), dict[str, NDArray[np.uint8]]()  # the bytes of each piece
    moved = [n for n, piece in enumerate(layout.pieces) if not available_PN[list(piece.processes), n].all()]
    is_intact = True
    try:
        for n, piece in enumerate(layout.pieces):
            if available_PN[process, n] and (process in piece.processes or (n in moved and sources[n] == process)):
                slot = next(slot for slot in slots if piece.name in slot.offsets)
                pieces[piece.name] = slot.read(piece.name, piece.num_bytes)
    except (OSError, ValueError):
        is_intact = False
    if not all(allgather(is_intact)):
        return None
    names = {layout.pieces[n].name: layout.pieces[n].num_bytes for n in moved}
    own = [pieces.get(layout.pieces[n].name) if sources[n] == process else None for n in moved]
    sent = [np.zeros(size, np.uint8) if x is None else x for x, size in zip(own, names.values(), strict=True)]
    if sent:
        arrived = _sum_bytes(np.concatenate(sent), run.trainer.mesh)
        ends = np.cumsum(list(names.values()))[:-1].tolist()
        pieces |= dict(zip(names, np.split(arrived, ends), strict=True))
    state = _assemble(run.trainer.state_shapes, pieces)
    found = array_records(state, jax.device_get(digest_program(run.trainer.state_shapes)(state)))
    return state if found == record.leaves and int(state["step"]) == record.step else None


def _sum_bytes(own: NDArray[np.uint8], mesh: Mesh) -> NDArray[np.uint8]:
    """The sum over all processes of byte arrays of one length, of which at most one is not zero at each index.

    It is computed as a sum of 4-byte words over the devices, which then copies any bytes exactly.
    """
    words = np.zeros(-(-own.size // 4), np.uint32)
    words.view(np.uint8)[: own.size] = own
    size = min(_MAX_WORDS, words.size)
    words = np.pad(words, (0, -words.size % size))
    shape = jax.ShapeDtypeStruct((mesh.size, size), np.uint32, sharding=by_device(mesh))
    add = checksum_words(mesh).lower(shape).compile()
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    for start in range(0, words.size, size):
        part = words[start : start + size]
        rows = [part[None], *[np.zeros_like(part)[None]] * (len(local) - 1)]
        placed = [jax.device_put(row, device) for row, device in zip(rows, local, strict=True)]
        sent = jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, placed)
        words[start : start + size] = jax.device_get(add(sent))
    return words.view(np.uint8)[: own.size]


def _assemble(shapes: Any, pieces: Mapping[str, NDArray[np.uint8]]) -> Any:
    """A tree of arrays with these shapes and shardings, made of the bytes of this process's pieces."""

    def array(name: str, shape: Any) -> jax.Array:
        def part(slices: tuple[slice, ...] | None) -> NDArray[Any]:
            assert slices is not None
            index = index_of(slices, shape.shape)
            return pieces[piece_name(name, index)].view(shape.dtype).reshape([stop - start for start, stop in index])

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    arrays = map(array, names_of(shapes), jax.tree.leaves(shapes))
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _listed(processes: Sequence[int]) -> str:
    return " and ".join(map(str, processes))
