"""Safety copies of the training state in the memory of two nodes, from which a run goes on when one of them is lost.

After FlowMoE, which keeps a replica of each expert on another node; here of everything that one node alone has.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from jax.stages import Compiled

from moe_jax.errors import ConfigError, DivergedError
from moe_jax.files import write_atomically
from moe_jax.parallel.pieces import send_pieces
from moe_jax.plan.plan_text import size
from moe_jax.train.checkpoint_arrays import leaves_of
from moe_jax.train.checkpoint_record import Record
from moe_jax.train.diverged import GoBack
from moe_jax.train.metrics import RunLog, human_seconds
from moe_jax.train.processes import allgather, from_process, is_main_process
from moe_jax.train.programs import compiled
from moe_jax.train.restore import Restored
from moe_jax.train.safety_files import SlotFiles
from moe_jax.train.safety_layout import Kept
from moe_jax.train.safety_plan import SafetyPlan
from moe_jax.train.safety_restore import RUN_ID
from moe_jax.train.setup import Run, about


class Safety:
    """Makes the copies of a run, if it has any. Making it takes their memory: raises ConfigError if there is none left.

    All processes call all of its methods. The programs that send pieces are compiled in the background.
    """

    def __init__(self, run: Run, restored: Restored | None):
        self._run, self._every, self._last = run, run.config.checkpoint.safety_every, run.config.train.steps
        self._plan = run.safety if run.first_step < self._last else None
        self._failed = False
        if self._plan is None:
            return
        self._files = _reserved(self._plan, restored, run.config.checkpoint.safety_dir)
        self._run_id = restored.run_id if restored and restored.run_id else allgather(1 + secrets.randbits(31))[0]
        self._about = about(run)
        self._programs = _programs(self._plan, run.trainer.state_shapes)

    @contextmanager
    def begun(self, log: RunLog, digests: Future[Compiled]) -> Iterator[None]:
        """With copies while the run goes on. At its end nothing is left of them, nor if it has diverged."""
        self._log, self._digests = log, digests
        if self._plan is None:
            yield
            return
        if is_main_process():
            write_atomically(self._run.folder / RUN_ID, f"{self._run_id}\n")
        try:
            yield
        except (DivergedError, GoBack):
            self._files.forget()
            raise
        else:
            shutil.rmtree(self._plan.folder, ignore_errors=True)  # on every node; others of this one may do it, too
        finally:
            self._files.close()

    def due(self, step: int) -> bool:
        """Whether copies are to be made behind a step; at the start they bring those back that were lost."""
        if self._plan is None or step == self._last:
            return False
        return step == self._run.first_step or step % self._every == 0

    def keep(
        self, step: int, state: Any, *, data: Mapping[str, Any], tuner: Mapping[str, Any] | None, is_recorded: bool
    ) -> None:
        """Make copies; returns when all processes have them. One that fails is told, and the ones before stay.

        `is_recorded`: metrics.jsonl is going to have a record of this step, without which the copies are of no use.
        """
        assert self._plan is not None
        began = time.perf_counter()
        leaves = leaves_of(state, jax.device_get(self._digests.result()(state)))
        tuner = from_process(0, tuner) if self._run.choices else None
        record = Record(step=step, leaves=leaves, data=data, tuner=tuner, **self._about)
        problem = self._write(state)
        if problem is None:
            try:
                self._files.end(self._run_id, record, is_recorded)
            except OSError as error:
                problem = error
        if any(allgather(problem is not None)):
            self._tell_failure(step, problem)
            return
        self._files.turn()
        took_s, self._failed = time.perf_counter() - began, False
        if step == self._run.first_step:
            self._log.tell(f"safety copies of step {step} took {human_seconds(took_s)}")
        elif is_recorded:
            self._log.write({"step": step, "safety_s": took_s})

    def _write(self, state: Any) -> OSError | None:
        """All pieces, one array after another, so that the devices need no more than one of them in addition."""
        assert self._plan is not None
        problem = None
        devices = list(self._run.trainer.mesh.devices.flat)
        own, received = (_by_array(kept) for kept in (self._plan.own, self._plan.received))
        try:
            self._files.begin()
        except OSError as error:
            problem = error
        for number, array in enumerate(jax.tree.leaves(state)):
            sent = self._programs[number].result()(array) if number in self._programs else None
            pieces = _on(devices, array, own.get(number, [])) | _on(devices, sent, received.get(number, []))
            if problem is None:  # others need what is sent
                try:
                    self._files.write(pieces)
                except OSError as error:
                    problem = error
            jax.block_until_ready(sent)
        return problem

    def _tell_failure(self, step: int, problem: OSError | None) -> None:
        if not self._failed:
            reason = problem.strerror if problem else "another process failed"
            text = f"safety copies of step {step} failed ({reason}): the ones before stay, and the next are tried"
            self._log.write({"step": step, "alarm": text})
            self._log.warn(text)
        self._failed = True


def _reserved(plan: SafetyPlan, restored: Restored | None, home: str) -> SlotFiles:
    """Files with room for all copies; those that the state was made of stay until there are newer ones."""
    files, number = None, 0
    try:
        files = SlotFiles(plan.own_folder, plan.place, plan.sizes, restored.files if restored else frozenset())
    except OSError as error:
        number = error.errno or 1
    failed = {process: code for process, code in enumerate(allgather(number)) if code}
    if failed or files is None:
        if files is not None:
            files.close()
        process, code = next(iter(failed.items()))
        raise ConfigError(
            f"checkpoint.safety_dir={home} cannot hold safety copies, twice {size(sum(plan.sizes.values()))} for each "
            f"process ({os.strerror(code)}, process {process}): make room, name another folder in memory, or use "
            "checkpoint.safety_every=0"
        )
    return files


def _programs(plan: SafetyPlan, shapes: Any) -> dict[int, Future[Compiled]]:
    """By the number of an array of which pieces are sent; arrays that are cut alike share one."""
    pool, found, alike = ThreadPoolExecutor(max_workers=1), dict[int, Future[Compiled]](), dict[Any, Future[Compiled]]()
    for number, shape in enumerate(jax.tree.leaves(shapes)):
        if pairs := plan.layout.pairs(number):
            key = shape.shape, shape.dtype, shape.sharding, tuple(pairs)
            if key not in alike:
                alike[key] = pool.submit(compiled, send_pieces(shape.sharding, pairs).lower(shape))
            found[number] = alike[key]
    pool.shutdown(wait=False)
    return found


def _by_array(kept: Iterable[Kept]) -> dict[int, list[Kept]]:
    found: dict[int, list[Kept]] = {}
    for each in kept:
        found.setdefault(each.piece.array, []).append(each)
    return found


def _on(devices: Sequence[jax.Device], array: jax.Array | None, kept: Sequence[Kept]) -> dict[str, jax.Array]:
    """What devices hold of an array, by the names of the pieces."""
    if array is None or not kept:
        return {}
    of_device = {shard.device: shard.data for shard in array.addressable_shards}
    return {each.piece.name: of_device[devices[each.device]] for each in kept}
