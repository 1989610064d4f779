"""Does transformers read quantised weights as import does? python profiling/quantized.py --transformers PYTHON

PYTHON is the interpreter of an environment with torch, transformers and accelerate. Two models of tests/golden are
quantised: DeepSeek-V3 in FP8 with blocks of 4 × 4, since transformers needs multiples of the block, and gpt-oss in
MXFP4. transformers dequantises the folders, and its logits are compared with those of the models imported here
(tests/golden/check.py). Writes results/quantized.json.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from results_file import rounded, write_result
from safetensors.numpy import load_file, save_file

from moe_jax.errors import CommandParser, UserError, run_command

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.convert import quantize  # noqa: E402
from tests.convert.golden import GOLDEN, logits_in  # noqa: E402


class TransformersError(UserError):
    """Raised if transformers cannot load a folder, or has other logits."""


def main() -> None:
    """Quantise, import, compare, and write the result."""
    parser = CommandParser(prog="python profiling/quantized.py", description=__doc__)
    parser.add_argument("--transformers", required=True, metavar="PYTHON", help="python with transformers")
    python = parser.parse_args().transformers
    with tempfile.TemporaryDirectory() as home:
        deepseek, _ = quantize.deepseek_v3(Path(home) / "fp8", GOLDEN / "deepseek_v3", (4, 4))
        gpt_oss, _ = quantize.gpt_oss(Path(home) / "mxfp4")
        found = {folder.name: _compared(python, folder) for folder in (deepseek, gpt_oss)}
    transformers, torch = _call(
        python, "-c", "import torch, transformers as t; print(t.__version__, torch.__version__)"
    ).split()
    write_result("quantized", {"transformers": transformers, "torch": torch} | found)


def _compared(python: str, folder: Path) -> dict[str, float]:
    """Return the largest logit, and the largest difference of transformers' logits. Raises TransformersError."""
    expected, logits = folder / "golden.safetensors", logits_in(folder)
    save_file({"tokens": load_file(expected)["tokens"], "logits": logits}, expected)
    output = _call(python, str(GOLDEN / "check.py"), str(folder), str(expected))
    match = re.search(r"largest difference (\S+)", output)
    assert match is not None, "check.py prints it"
    return {"largest_logit": rounded(float(np.abs(logits).max())), "largest_difference": float(match[1])}


def _call(*command: str) -> str:
    """Run a command and return its output. Raises TransformersError."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TransformersError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


if __name__ == "__main__":
    run_command(main)
