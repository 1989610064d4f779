"""Where the processes of a run meet while a checkpoint is saved in the background, and hear if one of them has failed.

orbax's own barriers would wait for a process that failed until they time out.
"""

import itertools
import threading
import time
from typing import Any

import jax
from jax._src import distributed  # no public interface has jax's coordination service

# orbax's barriers of a save, in order: all have written, and process 0 has committed. It has others, at which nothing
# has to be the same.
_STAGES = ("async_write_complete", "async_commit_complete")
_HERE, _FAILED = "here", "failed"
_numbers = itertools.count()


class SavesApartError(Exception):
    """Another process could not save its part."""


class SaveMeeting:
    """A `barrier_sync_fn` of orbax, for one save at a time; all processes make theirs, and begin each save, alike."""

    def __init__(self) -> None:
        self._name = ""
        self._passed = len(_STAGES)  # stages of the save
        self._saves: threading.Thread | None = None

    def begin(self) -> None:
        """A save, by this thread. All processes have ended the one before."""
        if self._name and jax.process_count() > 1 and jax.process_index() == 0:
            _service().key_value_delete(f"{self._name}/")
        self._name, self._passed = f"moe_jax_save_{next(_numbers)}", 0
        self._saves = threading.current_thread()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the others. Raises SavesApartError if one of them has failed, and jax's error if it takes too long.

        At the end of a save, which is in a thread of orbax's, a process that has not passed all stages has failed.
        """
        stage = next((number for number, name in enumerate(_STAGES) if name in key), None)
        if stage is None:
            if threading.current_thread() is not self._saves:
                self.end()
            return
        if jax.process_count() == 1:
            return
        self._passed = stage + 1
        if self._agreed(stage, timeout_ms) != _HERE:
            raise SavesApartError("another process failed")

    def end(self) -> None:
        """Tell the others that this process comes to no stage any more that it has not come to."""
        if jax.process_count() == 1:
            return
        client = _service()
        for stage in range(self._passed, len(_STAGES)):
            names = ["all"] if jax.process_index() == 0 else []
            for name in (*names, jax.process_index()):
                client.key_value_set(f"{self._name}/{stage}/{name}", _FAILED, allow_overwrite=True)
        self._passed = len(_STAGES)

    def _agreed(self, stage: int, timeout_ms: int) -> Any:
        """Whether all are here, as process 0 hears it from each of the others."""
        client, deadline = _service(), time.monotonic() + timeout_ms / 1000
        client.key_value_set(f"{self._name}/{stage}/{jax.process_index()}", _HERE)
        if jax.process_index() == 0:
            found = {self._heard(f"{stage}/{process}", deadline) for process in range(jax.process_count())}
            client.key_value_set(f"{self._name}/{stage}/all", _HERE if found == {_HERE} else _FAILED)
        return self._heard(f"{stage}/all", deadline)

    def _heard(self, name: str, deadline: float) -> Any:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        return _service().blocking_key_value_get(f"{self._name}/{name}", left_ms)


def _service() -> Any:
    return distributed.global_state.client
