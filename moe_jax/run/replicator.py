"""Safety copies of the training state in the memory of two nodes, from which a run resumes if one of them is lost.

FlowMoE stores a replica of each expert on another node; here everything that only one node has is replicated.
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

from moe_jax.checkpoint.arrays import array_records
from moe_jax.checkpoint.checksums import agreed_digests
from moe_jax.checkpoint.record import Record, Restored
from moe_jax.checkpoint.replicas.files import SlotFiles
from moe_jax.checkpoint.replicas.layout import StoredPiece
from moe_jax.checkpoint.replicas.plan import SafetyPlan
from moe_jax.distributed.processes import allgather, first_problem, from_process, is_main_process
from moe_jax.errors import ConfigError, DivergedError
from moe_jax.files.atomic import write_atomically
from moe_jax.parallel.p2p_copy import p2p_copy_shards
from moe_jax.plan.units import size
from moe_jax.run.divergence import RollBack
from moe_jax.run.restore_from_replicas import RUN_ID
from moe_jax.run.setup import Run, record_facts
from moe_jax.step.compile_cache import BackgroundCompile, compiled
from moe_jax.telemetry.run_log import RunLog, human_seconds

Arrays = tuple[int, ...]  # indices among the leaves of the state


class Replicator:
    """Makes the safety copies of a run, if they are enabled.

    All processes call all of its methods. The constructor reserves the memory for the copies, and raises ConfigError if
    there is not enough. The programs that send pieces are compiled in the background.
    """

    def __init__(self, run: Run, restored: Restored | None):
        self._run, self._every, self._last = run, run.config.checkpoint.safety_copies_every, run.config.train.steps
        self._plan = run.safety if run.first_step < self._last else None
        self._failed = self._has_copies = False
        if self._plan is None:
            return
        self._files = _reserved(self._plan, restored, run.config.checkpoint.safety_copies_dir)
        with self.released_if_refused():
            self._run_id = restored.run_id if restored and restored.run_id else allgather(1 + secrets.randbits(31))[0]
            self._facts = from_process(0, record_facts(run))  # one record for all nodes: their own settings may differ
            self._programs = _programs(self._plan, run.trainer.state_shapes)

    @contextmanager
    def released_if_refused(self) -> Iterator[None]:
        """Context which releases the reserved memory if the run fails in it before it has made a copy.

        The copy that the state was restored from stays, so that the run can still resume from it.
        """
        try:
            yield
        except BaseException:
            if self._plan is not None and not self._has_copies:
                self._files.close()
                self._files.remove_new()
            raise

    @contextmanager
    def running(self, log: RunLog, digests: BackgroundCompile) -> Iterator[None]:
        """Context in which copies can be made. They are removed at the end of the run, also if it has diverged."""
        self._log, self._digests = log, digests
        if self._plan is None:
            yield
            self._remove()
            return
        if is_main_process():
            write_atomically(self._run.folder / RUN_ID, f"{self._run_id}\n")
        try:
            yield
        except RollBack:
            self._files.invalidate()
            raise
        except DivergedError:
            self._remove()
            raise
        else:
            self._remove()
        finally:
            self._files.close()

    def _remove(self) -> None:
        """Remove the copies on this node; other processes of the node may do so at the same time."""
        if self._run.safety is not None:
            shutil.rmtree(self._run.safety.folder, ignore_errors=True)

    def due(self, step: int) -> bool:
        """Whether copies are due after a step. They are also due at the start, to replace lost ones."""
        if self._plan is None or step == self._last:
            return False
        return step == self._run.first_step or step % self._every == 0

    def replicate(self, step: int, state: Any, *, is_recorded: bool, **host: Any) -> None:
        """Make copies of the state; returns when all processes have them.

        A failure is reported, and the preceding copies remain valid. `is_recorded`: metrics.jsonl will have a record of
        this step; the copies are then only used if it does. `host`: state of the run on the host, for the record of the
        copies, as in checkpoints.
        """
        assert self._plan is not None
        digests = self._compiled()
        start = time.perf_counter()
        leaves = array_records(state, agreed_digests(digests(state), step, state))
        host["tuner"] = from_process(0, host["tuner"]) if self._run.choices else None
        record = Record(step=step, leaves=leaves, **host, **self._facts)
        problem = self._write(state)
        if problem is None:
            try:
                self._files.end(self._run_id, record, is_recorded)
            except OSError as error:
                problem = error
        if reason := first_problem(problem.strerror or str(problem) if problem else ""):
            self._report_failure(step, reason)
            return
        self._files.swap()
        self._has_copies = True
        took_s, self._failed = time.perf_counter() - start, False
        if step == self._run.first_step:
            self._log.info(f"safety copies of step {step} took {human_seconds(took_s)}")
        elif is_recorded:
            self._log.write({"step": step, "safety_s": took_s})

    def _compiled(self) -> Compiled:
        """The program that computes checksums. Waits until all programs are compiled, which delays training once."""
        for _, program in self._programs.values():
            program.result()
        return self._digests.result()

    def _write(self, state: Any) -> OSError | None:
        """Send and write all pieces; returns the error if this process cannot write.

        Arrays are sent in groups, so that a device needs no more additional memory than for its largest array.
        """
        assert self._plan is not None
        problem, arrays = None, jax.tree.leaves(state)
        try:
            self._files.begin()
        except OSError as error:
            problem = error
        for group in self._plan.layout.groups:
            sent = self._sent(group, arrays)
            pieces = self._pieces(self._plan.own, {number: arrays[number] for number in group})
            pieces |= self._pieces(self._plan.received, sent)
            if problem is None:  # after an error, this process still sends the pieces that others need
                try:
                    self._files.write(pieces)
                except OSError as error:
                    problem = error
            jax.block_until_ready(sent)
        return problem

    def _sent(self, group: Arrays, arrays: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """The pieces that the devices receive from other nodes, by the numbers of their arrays."""
        if group not in self._programs:
            return {}
        numbers, program = self._programs[group]
        return dict(zip(numbers, program.result()([arrays[number] for number in numbers]), strict=True))

    def _pieces(self, stored: Iterable[StoredPiece], arrays: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
        """The pieces of these arrays that this process stores, by name: shards on its devices."""
        devices = list(self._run.trainer.mesh.devices.flat)
        shards = {n: {shard.device: shard.data for shard in x.addressable_shards} for n, x in arrays.items()}
        return {
            each.piece.name: shards[each.piece.array][devices[each.device]]
            for each in stored
            if each.piece.array in shards
        }

    def _report_failure(self, step: int, reason: str) -> None:
        """Record and print the first failure in a row."""
        if not self._failed:
            text = f"safety copies of step {step} failed ({reason}): the ones before stay, and the next are tried"
            self._log.write({"step": step, "alarm": text})
            self._log.warn(text)
        self._failed = True


def _reserved(plan: SafetyPlan, restored: Restored | None, home: str) -> SlotFiles:
    """Files with space for all copies. Those that the state was restored from stay until there are newer ones.

    Raises ConfigError if a process has not enough space.
    """
    files, number = None, 0
    try:
        files = SlotFiles(plan.own_folder, plan.place, plan.sizes, restored.files if restored else frozenset())
    except OSError as error:
        number = error.errno or 1
    failed = {process: code for process, code in enumerate(allgather(number)) if code}
    if failed or files is None:
        if files is not None:
            files.close()
            files.remove_new()
        process, code = next(iter(failed.items()))
        raise ConfigError(
            f"checkpoint.safety_copies_dir={home} cannot hold safety copies, twice {size(sum(plan.sizes.values()))} "
            f"for each process ({os.strerror(code)}, process {process}): free some space, name another folder in "
            "memory, or "
            "use checkpoint.safety_copies_every=0"
        )
    return files


def _programs(plan: SafetyPlan, shapes: Any) -> dict[Arrays, tuple[Arrays, Future[Compiled]]]:
    """For each group of arrays, those with pieces to send (groups without are absent), and the program that does it."""
    pool, arrays, found = ThreadPoolExecutor(max_workers=1), jax.tree.leaves(shapes), {}
    for group in plan.layout.groups:
        if numbers := tuple(number for number in group if plan.layout.pairs(number)):
            sent = [arrays[number] for number in numbers]
            send = p2p_copy_shards(
                [shape.sharding for shape in sent], [plan.layout.pairs(number) for number in numbers]
            )
            found[group] = numbers, pool.submit(compiled, send.lower(sent))
    pool.shutdown(wait=False)
    return found
