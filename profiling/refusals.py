"""How soon is bad input told? python profiling/refusals.py [TIMES]

Starts real commands, so many times (3): training with a data file that has a flipped bit, with checkpoints of another
model, and on a mesh that the devices cannot form, and the import of a model whose numbers are of a wrong type. Each has
to end with exit code 2 and one line. Writes results/refusals.json; exit code 1 if one does not.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from count_argument import count_argument
from results_file import quartiles, write_result
from safetensors.numpy import load_file, save_file
from training_run import CONFIG, tiny

from moe_jax.errors import run_command
from moe_jax.train.prepare import prepare_text

MODEL = Path(__file__).resolve().parents[1] / "tests/golden/mixtral"
TRAIN = ["moe_jax.train", "--config", CONFIG, *tiny(4, batch_size=4, seq_len=32, experts=4), "train.steps=2"]


def main() -> None:
    """Try all and write the result."""
    times = count_argument("TIMES", 3, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        cases = _cases(Path(folder))
        found = {name: _refused(command, times, folder) for name, command in cases.items()}
    write_result("refusals", {"cases": found})
    if wrong := [name for name, each in found.items() if (each["exit_codes"], each["lines"]) != ([2], [1])]:
        sys.exit(f"not told as it should be: {', '.join(wrong)}")


def _cases(folder: Path) -> dict[str, list[str]]:
    """Commands that are refused, and what they name, in `folder`."""
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
        "checkpoints of another model": [*TRAIN, trained, "model.d_model=32"],
        "a mesh that is none": [*TRAIN, new, "mesh.expert=3"],
        "a model of a wrong type": ["moe_jax.convert", "import", f"{folder / 'model'}", "--out", f"{folder / 'run'}"],
    }


def _refused(command: Sequence[str], times: int, folder: str) -> dict[str, Any]:
    tries = []
    for _ in range(times):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        tries.append((time.perf_counter() - start, done.returncode, done.stderr.replace(folder, "FOLDER")))
    seconds, codes, said = zip(*tries, strict=True)
    print(said[0], end="", flush=True)
    lines = {text.count("\n") for text in said}
    return {
        "seconds": quartiles(seconds) | {"largest": round(max(seconds), 2)},
        "exit_codes": sorted(set(codes)),
        "lines": sorted(lines),
        "said": said[0].strip(),
    }


if __name__ == "__main__":
    run_command(main)
