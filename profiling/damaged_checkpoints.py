"""Does a restore notice damaged checkpoints and killed saves? python profiling/damaged_checkpoints.py [--tries N]
[--kills N]

A tiny run has two checkpoints. One random file of the newer one is damaged: a bit flips, the file is truncated, some of
it becomes zeros, or it is deleted. Then the latest checkpoint is restored. Either its arrays are equal bit for bit,
since the damage was not significant, or the damage is detected, and the older one is restored. Then processes that save
in an endless loop are killed at random times: the latest checkpoint has to be exact, and no older than the last
committed one.
"""

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from results_file import write_result

from moe_jax.checkpoint.arrays import read_arrays
from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.files import FOLDER, newest_checkpoint
from moe_jax.checkpoint.load import read_newest
from moe_jax.checkpoint.save import Checkpoints
from moe_jax.errors import CommandParser, run_command
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.telemetry.run_log import RunLog

OLDER, NEWER = 1, 2  # steps
EQUAL = "equal bit for bit"
NOTICED = {by: f"noticed by its {by}, and the older one restored" for by in ("files", "digests")}  # else a failure
KINDS = ("bit", "cut", "zeros", "gone")
_LONGEST_S = 0.3  # longest time until a saving process is killed


def main() -> None:
    """Damage checkpoints, kill saves, and write results/damaged_checkpoints.json."""
    parser = CommandParser(prog="python profiling/damaged_checkpoints.py", description=__doc__)
    parser.add_argument("--tries", type=int, default=1000, metavar="N", help="damages (default: 1000)")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="killed processes (default: 100)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = saved_run(Path(folder) / "damaged")
        rng = random.Random(0)
        outcomes = Counter(f"{kind}: {damage(run, rng, kind)}" for kind in KINDS for _ in range(arguments.tries // 4))
        kills = Counter(killed(Path(folder) / "killed", rng, arguments.kills))
    write_result("damaged_checkpoints", {"damages": dict(outcomes), "kills": dict(kills)})


def state_of(step: int) -> dict[str, Any]:
    """Return arrays that differ from those of every other step, on one device."""
    rng = np.random.default_rng(step)
    params = {"w": rng.standard_normal((32, 48), np.float32), "scale": jax.numpy.bfloat16(rng.standard_normal(24))}
    moments = {"w": rng.standard_normal((32, 48), np.float32), "count": np.int32(step)}
    state = {"step": np.int32(step), "params": params, "optimizer": moments}
    return jax.device_put(state, jax.sharding.NamedSharding(one_device_mesh(), REPLICATED))


def saved_run(run: Path) -> Path:
    """Create a run's folder with two checkpoints and return it."""
    with _checkpoints(run) as checkpoints:
        for step in (OLDER, NEWER):
            checkpoints.save(step, state_of(step), data={"next_index": step})
    return run


def damage(run: Path, rng: random.Random, kind: str) -> str:
    """Damage a file of the newer checkpoint, restore, and repair the file; return the outcome."""
    file = rng.choice(sorted(path for path in (run / FOLDER / str(NEWER)).rglob("*") if path.is_file()))
    content = file.read_bytes()
    place = rng.randrange(max(len(content), 1))
    if kind == "gone":
        file.unlink()
    else:
        file.write_bytes(_damaged(content, kind, place, rng.randrange(8)))
    try:
        with _captured_output() as output:
            outcome = _restored(run)
        return f"{outcome}, and something was printed" if output else outcome
    finally:
        file.write_bytes(content)


def killed(run: Path, rng: random.Random, kills: int) -> Iterator[str]:
    """Start processes that save in an endless loop and kill them; yield the outcome of each."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["moe_jax.checkpoint.save", "moe_jax.run.restore"])  # these import the libraries
    for _ in range(kills):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_save_on, args=(run, there))
        process.start()
        there.close()
        committed = here.recv()
        time.sleep(rng.uniform(0, _LONGEST_S))
        process.kill()
        process.join()
        try:
            while True:
                committed = here.recv()
        except EOFError:
            yield _restored(run, committed)


def _damaged(content: bytes, kind: str, place: int, bit: int) -> bytes:
    if kind == "cut":
        return content[:place]
    if kind == "zeros":
        return content[:place] + bytes(len(content[place : place + 512])) + content[place + 512 :]
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def _restored(run: Path, at_least: int = OLDER) -> str:
    """Restore the latest checkpoint and return the outcome; `at_least` is the last committed step."""
    shapes, passed_over = jax.tree.map(_shape, state_of(0)), dict[int, str]()
    try:
        found = read_newest(run, lambda record: (record, read_arrays(run, record, shapes)), passed_over)
    except Exception as error:
        return f"raised {error}"
    if found is None:
        return "found nothing"
    record, state = found
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), state, state_of(record.step))
    if not all(jax.tree.leaves(same)) or record.data != {"next_index": record.step}:
        return "SILENTLY WRONG"
    if record.step < at_least:
        return "older than what was committed"
    return NOTICED["digests" if "digest" in passed_over[NEWER] else "files"] if passed_over else EQUAL


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _checkpoints(run: Path) -> Checkpoints:
    log = RunLog(run, start_step=0, total_steps=1, tokens_per_step=1, tensorboard=False, quiet=True)
    about: dict[str, Any] = {"config": {}, "mesh": {}, "versions": {}}
    return Checkpoints(run, 2, log, digest_program(state_of(0)), about)


def _save_on(run: Path, progress: Connection) -> None:
    """Save steps after the latest one in an endless loop, and send the last one that is certainly committed.

    Runs in a process of its own.
    """
    first = newest_checkpoint(run) or 0
    with _checkpoints(run) as checkpoints:
        for step in count(first + 1):
            checkpoints.save(step, state_of(step), data={"next_index": step})
            if step > 1:
                progress.send(step - 1)  # a save begins when the previous one is done


@contextmanager
def _captured_output() -> Iterator[list[bytes]]:
    """Capture the output within this context, including that of threads and C++."""
    output: list[bytes] = []
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield output
        finally:
            for number, own in zip((1, 2), saved, strict=True):
                os.dup2(own, number)
                os.close(own)
            file.seek(0)
            output += [text for text in [file.read()] if text]


if __name__ == "__main__":
    run_command(main)
