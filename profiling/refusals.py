"""How soon is bad input refused? python profiling/refusals.py [TIMES]

Starts real commands, each TIMES times (3): training with a data file that has a flipped bit, with checkpoints of
another model, and on an invalid mesh, and the import of a model with numbers of a wrong type. Then tries each of the
inputs of `hostile_inputs.py` once. Every command has to end within 10 s, with exit code 2 and one line. Writes
results/refusals.json; exit code 1 if one does not.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from count_argument import count_argument
from hostile_inputs import MODEL, Hostile, hostile_inputs, make_inputs
from results_file import quartiles, write_result
from safetensors.numpy import load_file, save_file
from training_run import CONFIG, tiny

from moe_jax.data.prepare import prepare_text
from moe_jax.errors import run_command

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 10
TRAIN = ["moe_jax.train", "--config", CONFIG, *tiny(4, batch_size=4, seq_len=32, experts=4), "train.steps=2"]
_SHOWN = 300  # characters of a command's output


class Refused(NamedTuple):
    """How one command ended."""

    seconds: float
    exit_code: int
    errors: str

    @property
    def is_right(self) -> bool:
        one_line = self.errors.startswith("error: ") and self.errors.count("\n") == 1
        return self.seconds <= MOST_S and self.exit_code == 2 and one_line


def main() -> None:
    """Try all inputs and write the result."""
    times = count_argument("TIMES", 3, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        cases = _cases(Path(folder))
        found = {name: _tried(command, times, folder) for name, command in cases.items()}
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        inputs = list(hostile_inputs())
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each command computes on one core
            ends = pool.map(lambda each: try_command(real_command(each), folder, each.environ), inputs)
            hostile = {each.name: end for each, end in zip(inputs, ends, strict=True)}
    wrong = [name for name, each in found.items() if not each["all_right"]]
    wrong += [name for name, each in hostile.items() if not each.is_right]
    seconds = [each.seconds for each in hostile.values()]
    summary = {
        "inputs": len(hostile),
        "one_line_and_exit_code_2_in_time": sum(each.is_right for each in hostile.values()),
        "seconds": quartiles(seconds) | {"largest": round(max(seconds), 2)},
    }
    hostile_values = {name: _values(each) for name, each in hostile.items()}
    write_result("refusals", {"summary": summary, "cases": found, "hostile": hostile_values})
    print(f"{summary['one_line_and_exit_code_2_in_time']} of {len(hostile)} hostile inputs: one line and exit code 2")
    if wrong:
        sys.exit(f"not refused as they should be: {', '.join(wrong)}")


def _values(refused: Refused) -> dict[str, Any]:
    output = refused.errors.strip()
    short = output if len(output) <= _SHOWN else f"{output[:_SHOWN]}…"
    return {"seconds": round(refused.seconds, 2), "exit_code": refused.exit_code, "said": short}


def _cases(folder: Path) -> dict[str, list[str]]:
    """Prepare inputs in `folder`; return the commands that have to reject them, by name."""
    (folder / "text.txt").write_bytes(np.random.default_rng(0).integers(65, 90, 20_000, np.uint8).tobytes())
    prepare_text(folder / "text.txt", folder / "tokens")
    tokens = bytearray((folder / "tokens/train.bin").read_bytes())
    tokens[100] ^= 1
    (folder / "tokens/train.bin").write_bytes(tokens)
    shutil.copytree(MODEL, folder / "model")
    weights = min((folder / "model").glob("model*.safetensors"))
    tensors = load_file(weights)
    first = min(tensors)
    save_file(tensors | {first: tensors[first].astype(np.int8)}, weights)
    trained, new = (f"log.dir={folder / name}" for name in ("trained", "new"))
    subprocess.run([sys.executable, "-m", *TRAIN, trained], check=True, capture_output=True)
    return {
        "a data file with a flipped bit": [*TRAIN, new, f"data.path={folder / 'tokens'}"],
        "checkpoints of another model": [*TRAIN, trained, "model.hidden_size=32"],
        "an invalid mesh": [*TRAIN, new, "mesh.expert=3"],
        "a model of a wrong type": ["moe_jax.convert", "import", f"{folder / 'model'}", "--out", f"{folder / 'run'}"],
    }


def _tried(command: Sequence[str], times: int, folder: str) -> dict[str, Any]:
    tries = [try_command([sys.executable, "-m", *command], None, {}) for _ in range(times)]
    seconds = [each.seconds for each in tries]
    return {
        "seconds": quartiles(seconds) | {"largest": round(max(seconds), 2)},
        "exit_codes": sorted({each.exit_code for each in tries}),
        "all_right": all(each.is_right for each in tries),
        "said": tries[0].errors.replace(folder, "FOLDER").strip(),
    }


def real_command(each: Hostile) -> list[str]:
    """Return the command line of a real process for an input."""
    name, *arguments = shlex.split(each.command)
    program = [str(ROOT / "scripts/prepare_text.py")] if name == "prepare_text" else ["-m", f"moe_jax.{name}"]
    command = [sys.executable, *program, *arguments]
    return ["sh", "-c", f'exec "$@" {each.streams}', "sh", *command] if each.streams else command


def try_command(command: Sequence[str], folder: str | None, environ: Mapping[str, str]) -> Refused:
    """Run a command in a folder, or in the current one."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths), **environ}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=folder, env=given, capture_output=True, timeout=30 * MOST_S)
        code, errors = done.returncode, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired:
        code, errors = -1, "it did not end"
    return Refused(time.perf_counter() - start, code, errors)


if __name__ == "__main__":
    run_command(main)
