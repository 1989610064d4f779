"""A barrier for the processes of a run while a checkpoint is saved in the background; it reports if one has failed.

orbax's own barriers would wait for a failed process until they time out.
"""

import itertools
import threading
import time
from typing import Any

import jax

from moe_jax.distributed.hosts import coordination

# the barriers of an orbax save, in order: all processes have written, and process 0 has committed. orbax has other
# barriers, which need no synchronization here
WRITTEN, COMMITTED = _STAGES = ("async_write_complete", "async_commit_complete")
_ARRIVED, _FAILED = "here", "failed"
_numbers = itertools.count()


class PeerSaveError(Exception):
    """Another process could not save its shards."""


class SaveBarrier:
    """A `barrier_sync_fn` for orbax, used for one save at a time.

    All processes make their barriers and begin their saves in the same order, so that their keys match.
    """

    def __init__(self) -> None:
        self._name = ""
        self._passed = len(_STAGES)  # number of stages that this process has passed
        self._saving_thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a save in the current thread. All processes have ended the previous one."""
        if self._name and jax.process_count() > 1 and jax.process_index() == 0:
            coordination().client.key_value_delete(f"{self._name}/")
        self._name, self._passed = f"moe_jax_save_{next(_numbers)}", 0
        self._saving_thread = threading.current_thread()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes. Raises PeerSaveError if one has failed, and jax's error after the timeout.

        orbax also calls it at the end of a save, in a thread of its own: then a process that has not passed all stages
        has failed.
        """
        stage = next((number for number, name in enumerate(_STAGES) if name in key), None)
        if stage is None:
            if threading.current_thread() is not self._saving_thread:
                self.end()
            return
        if jax.process_count() == 1:
            return
        self._passed = stage + 1
        if self._exchange(stage, timeout_ms) != _ARRIVED:
            raise PeerSaveError("another process failed")

    def end(self) -> None:
        """Report to the others that this process has failed at all stages that it has not passed."""
        if jax.process_count() == 1:
            return
        client = coordination().client
        for stage in range(self._passed, len(_STAGES)):
            names = ["all"] if jax.process_index() == 0 else []
            for name in (*names, jax.process_index()):
                client.key_value_set(f"{self._name}/{stage}/{name}", _FAILED, allow_overwrite=True)
        self._passed = len(_STAGES)

    def _exchange(self, stage: int, timeout_ms: int) -> Any:
        """Wait until process 0 has heard from all others at a stage; return _ARRIVED if all have arrived."""
        client, deadline = coordination().client, time.monotonic() + timeout_ms / 1000
        client.key_value_set(f"{self._name}/{stage}/{jax.process_index()}", _ARRIVED)
        if jax.process_index() == 0:
            found = {self._wait_for_key(f"{stage}/{process}", deadline) for process in range(jax.process_count())}
            client.key_value_set(f"{self._name}/{stage}/all", _ARRIVED if found == {_ARRIVED} else _FAILED)
        return self._wait_for_key(f"{stage}/all", deadline)

    def _wait_for_key(self, name: str, deadline: float) -> Any:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        return coordination().client.blocking_key_value_get(f"{self._name}/{name}", left_ms)
