"""What a run goes on with."""

from pathlib import Path
from typing import NamedTuple

from moe_jax.checkpoint.record import Record
from moe_jax.step.context import State


class Restored(NamedTuple):
    """A state, and where it is from."""

    state: State
    record: Record
    told: str = ""  # where from, if there was a choice
    run_id: int = 0  # of the safety copies that it was made of; 0: it is from a checkpoint
    files: frozenset[Path] = frozenset()  # of this node's
    is_validated: bool = True  # if that was due; not always behind a safety copy
