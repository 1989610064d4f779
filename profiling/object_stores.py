"""Does a run in a bucket end as an undisturbed one does? python profiling/object_stores.py [--kills N]

A tiny run trains by the command line into a local folder, and then into a bucket of each store, where it is killed at
random times and started again until it has been killed N times; then it may end. The losses of all its records and the
digests of its last checkpoint's arrays must be those of the local run, bit for bit.

The stores are tests/gcs_server.py and tests/s3_server.py, which leave requests unanswered for a while, refuse them with
503 or cut answers off. With moto's server of S3 in PATH (pip install 'moto[server]'), that is a third one, without
faults.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results_file import write_result

from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.files import object_store
from moe_jax.files.object_store import ObjectFolder

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gcs_server import GcsHandler
from tests.object_server import BUCKET, Server, serving
from tests.s3_server import S3Handler

FAULTS = {"unavailable": 0.01, "cut": 0.01, "slow": 0.01}  # shares of requests
STEPS, EVERY = 2000, 100
_PORT = 5577  # of moto's server
_MORE_STEPS = 100, 400  # a process is killed after so many of its own
_LONGEST_S = 0.5  # and up to so much later
_CONFIG = f"""
model:
  hidden_size: 16
  num_layers: 1
  num_attention_heads: 2
  moe: {{num_experts: 4, top_k: 2, intermediate_size: 16}}
data: {{path: text.txt, seq_len: 16}}
train: {{steps: {STEPS}, batch_size: 8, compute_dtype: float32}}
checkpoint: {{every: {EVERY}}}
log: {{sample_tokens: 0, tensorboard: false}}
"""


def main() -> None:
    """Train locally and into both stores, and write results/object_stores.json."""
    parser = CommandParser(prog="python profiling/object_stores.py", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="for each store (default: 10)")
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "run.yaml").write_text(_CONFIG)
        (work / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
        started = time.monotonic()
        _ended(_train(work, "undisturbed"))
        found: dict[str, Any] = {"steps": STEPS, "undisturbed_s": round(time.monotonic() - started, 1)}
        expected = _outcome(lambda name: (work / "undisturbed" / name).read_bytes())
        for handler in (GcsHandler, S3Handler):
            with serving(handler) as server:
                os.environ |= server.environment
                server.faults = dict(FAULTS)
                found[handler.scheme] = _killed(work, f"{server.bucket}/runs/killed", kills, expected, server)
            object_store._opened.cache_clear()  # of this server
        if shutil.which("moto_server") is None:
            print("moto_server is not found: its store is left out", flush=True)
        else:
            with _moto():
                found["moto"] = _killed(work, f"s3://{BUCKET}/runs/killed", kills, expected)
    write_result("object_stores", found)


def _train(work: Path, log_dir: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "moe_jax.train", "--config", "run.yaml", f"log.dir={log_dir}"]
    return subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _ended(process: "subprocess.Popen[str]", begun: str = "") -> str:
    """Return the output of a process, which began with `begun`. Raises UserError unless it succeeded or was killed."""
    output = begun + process.communicate()[0]
    if process.returncode not in (0, -9):
        raise UserError(f"the run ended with exit code {process.returncode}: {output.splitlines()[-1]}")
    return output


def _killed(work: Path, url: str, kills: int, expected: Any, server: Server | None = None) -> dict[str, Any]:
    """Train into a bucket, kill the process `kills` times, and compare what is there at the end."""
    rng, outputs = random.Random(0), list[str]()
    while len(outputs) < kills:
        process = _train(work, url)
        assert process.stdout is not None
        begun = "".join(_until_trained(process.stdout, rng.randrange(*_MORE_STEPS)))
        time.sleep(rng.uniform(0, _LONGEST_S))
        process.kill()
        outputs.append(_ended(process, begun))
        print(f"{url}: killed {len(outputs)}", flush=True)
    outputs.append(_ended(_train(work, url)))
    run = ObjectFolder(url)
    if server is not None:
        server.faults.clear()
    resumed = [
        line.split()[-1] for output in outputs for line in output.splitlines() if line.startswith("resuming from")
    ]
    records, leaves = _outcome(run.read)
    if records != expected[0] or leaves != expected[1]:
        raise UserError(f"{url} does not end as the undisturbed run")
    return {
        "kills": kills,
        "resumed_from": [int(step) for step in resumed],
        "equal_records": len(records),
        "equal_arrays": len(leaves),
        "checkpoints": sorted({name.split("/")[1] for name in run.names("checkpoints/")}),
        "warnings": [line for output in outputs for line in output.splitlines() if "warning" in line],
    } | ({"faults": dict(server.made)} if server else {})


def _until_trained(lines: Iterable[str], count: int) -> Iterator[str]:
    """Yield the lines that a run prints until it has trained so many steps."""
    first: int | None = None
    for line in lines:
        yield line
        if match := re.match(r"step +(\d+)/", line):
            first = int(match[1]) if first is None else first
            if int(match[1]) >= first + count:
                return


def _outcome(read: Any) -> tuple[list[tuple[int, float]], Any]:
    """Return the losses of a run's records by step, and shapes and digests of the arrays of its last checkpoint."""
    records = [json.loads(line) for line in read("metrics.jsonl").splitlines()]
    losses = [
        (record["step"], record[key]) for record in records for key in ("loss", "validation_loss") if key in record
    ]
    return losses, json.loads(read(f"checkpoints/{STEPS}/record/metadata"))["content"]["leaves"]


@contextmanager
def _moto() -> Iterator[None]:
    """Context with moto's server and a bucket."""
    command = ["moto_server", "-H", "127.0.0.1", "-p", str(_PORT)]
    url = f"http://127.0.0.1:{_PORT}"
    os.environ |= {"AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            time.sleep(0.2)
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"))
                break
            except OSError:
                continue
        yield
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    run_command(main)
