"""The state and the record with which a run resumes."""

from pathlib import Path
from typing import NamedTuple

from moe_jax.checkpoint.record import Record
from moe_jax.step.context import State


class Restored(NamedTuple):
    """A restored state, and its source: a checkpoint on disk, or safety copies in the memory of nodes."""

    state: State
    record: Record
    source: str = ""  # a description of the source, if there was a choice
    run_id: int = 0  # the number of the run that made the safety copies; 0: the state is from a checkpoint
    files: frozenset[Path] = frozenset()  # safety copies on this node from which it was restored
    is_validated: bool = True  # whether validation after this step, if due, is done; it may not be after safety copies
