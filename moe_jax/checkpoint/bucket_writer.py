"""Writing checkpoints into a bucket with tensorstore, in the background.

orbax 0.12 writes to gs:// only with more packages installed, and not to s3://. The arrays have the format of its
checkpoints on disk: each process writes a database with its own shards, and process 0 joins these databases.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import jax
import numpy as np
import tensorstore

from moe_jax.checkpoint.checksums import names_of
from moe_jax.checkpoint.files import COMMIT_TIME, STATE
from moe_jax.checkpoint.record import METADATA
from moe_jax.checkpoint.save_barrier import COMMITTED as COMMIT_BARRIER
from moe_jax.checkpoint.save_barrier import WRITTEN, SaveBarrier
from moe_jax.checkpoint.storage import COMMITTED, BucketStorage
from moe_jax.distributed.processes import is_main_process, largest
from moe_jax.files.object_store import ANSWER_S

_SLOWEST = 10**7  # bytes per second of one process into a bucket, below which a save has failed


@final
class BucketWriter:
    """Saves checkpoints of one run, one at a time, with the methods of orbax's manager that `Checkpoints` calls.

    `before_commit` is called in process 0, before a step is committed.
    """

    def __init__(
        self, storage: BucketStorage, steps: list[int], barrier: SaveBarrier, before_commit: Callable[[], None]
    ):
        self._storage, self._steps, self._barrier, self._before_commit = storage, steps, barrier, before_commit
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def all_steps(self) -> list[int]:
        return self._steps

    def latest_step(self) -> int | None:
        return max(self._steps, default=None)

    def write(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Begin to save a state, whose arrays may be donated as soon as this returns."""
        written, num_bytes = self._stage(step, state)
        limit_s = ANSWER_S + largest(num_bytes) / _SLOWEST
        self._pending = self._pool.submit(self._commit, step, written, record, limit_s)

    def wait_until_finished(self) -> None:
        """Wait for the save in progress. Raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save in progress, and raise its error unless it has been raised."""
        try:
            self.wait_until_finished()
        finally:
            self._pool.shutdown()

    def _stage(self, step: int, state: Any) -> tuple[tensorstore.Transaction, int]:
        """Copy this process's shards into a transaction of its own database; of replicas, only the first.

        Return it with the number of their bytes.
        """
        transaction, context = tensorstore.Transaction(), tensorstore.Context()
        database = {"driver": "ocdbt", "base": self._storage.spec(_database(step, jax.process_index()))}
        copied, num_bytes = [], 0
        for name, array in zip(names_of(state), jax.tree.leaves(state), strict=True):
            store = tensorstore.open(
                {"driver": "zarr3", "kvstore": database | {"path": f"{name}/"}},
                create=True,
                delete_existing=True,  # else a repeated request, whose answer was lost, finds the array there
                dtype=array.dtype,
                shape=array.shape,
                chunk_layout=tensorstore.ChunkLayout(chunk_shape=array.sharding.shard_shape(array.shape)),
                context=context,
                transaction=transaction,
            ).result()
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    num_bytes += shard.data.nbytes
                    copied.append(store[shard.index].write(np.array(shard.data)).copy)
        for each in copied:
            each.result()
        return transaction, num_bytes

    def _commit(self, step: int, written: tensorstore.Transaction, record: Mapping[str, Any], limit_s: float) -> None:
        """Write the shards, and in process 0, once all processes have written theirs, all else; runs in a thread.

        `limit_s` is the time for the shards of a process.
        """
        wait_ms = round(2000 * limit_s)  # for the other processes
        try:
            _write(written, limit_s)
            self._barrier(key=WRITTEN, timeout_ms=wait_ms)
            if is_main_process():
                self._join(step)
                self._storage.folder.write(f"{step}/{METADATA}", json.dumps(record).encode())
                self._before_commit()
                self._storage.folder.write(f"{step}/{COMMITTED}", json.dumps({COMMIT_TIME: time.time_ns()}).encode())
            self._barrier(key=COMMIT_BARRIER, timeout_ms=wait_ms)
        except BaseException:
            self._barrier.end()
            raise
        self._steps.append(step)

    def _join(self, step: int) -> None:
        """Make one database of those of all processes; it refers to their files, and copies only their indices."""
        target = {"driver": "ocdbt", "base": self._storage.spec(f"{step}/{STATE}")}
        transaction, context = tensorstore.Transaction(atomic=True), tensorstore.Context()
        joined = tensorstore.KvStore.open(target, context=context).result().with_transaction(transaction)
        for process in range(jax.process_count()):
            own = {"driver": "ocdbt", "base": self._storage.spec(_database(step, process))}
            shards = tensorstore.KvStore.open(own, context=context).result()
            shards.experimental_copy_range_to(joined).result(timeout=ANSWER_S)
        transaction.commit_async().result(timeout=ANSWER_S)


def _write(written: tensorstore.Transaction, limit_s: float) -> None:
    try:
        written.commit_async().result(timeout=limit_s)
    except TimeoutError:
        raise TimeoutError(f"it took more than {limit_s:.0f} s to write") from None


def _database(step: int, process: int) -> str:
    return f"{step}/{STATE}/ocdbt.process_{process}"
