"""Does transformers read quantised weights as import does? python profiling/quantized.py --transformers PYTHON

PYTHON is the interpreter of an environment with torch, transformers and accelerate. Two models of tests/golden are
quantised: DeepSeek-V3 in FP8 with blocks of 4 × 4, since transformers needs multiples of the block, and gpt-oss in
MXFP4. transformers dequantises the folders, and its logits are compared with those of the models imported here
(tests/golden/check.py). Writes results/quantized.json.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from results_file import rounded, write_result
from safetensors.numpy import load_file, save_file
from with_transformers import GOLDEN, Pair, asked_python, differences, versions

from moe_jax.errors import run_command

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.convert import quantize  # noqa: E402
from tests.convert.golden import logits_in  # noqa: E402


def main() -> None:
    """Quantise, import, compare, and write the result."""
    python = asked_python("quantized", __doc__)
    with tempfile.TemporaryDirectory() as home:
        deepseek, _ = quantize.deepseek_v3(Path(home) / "fp8", GOLDEN / "deepseek_v3", (4, 4))
        gpt_oss, _ = quantize.gpt_oss(Path(home) / "mxfp4")
        pairs = {folder.name: _with_logits(folder) for folder in (deepseek, gpt_oss)}
        found = differences(python, pairs)
        for name, (_, expected) in pairs.items():
            found[name]["largest_logit"] = rounded(float(np.abs(load_file(expected)["logits"]).max()))
    write_result("quantized", versions(python) | found)


def _with_logits(folder: Path) -> Pair:
    """Return a folder and its golden.safetensors, with the logits of the imported model instead of those there."""
    expected = folder / "golden.safetensors"
    save_file({"tokens": load_file(expected)["tokens"], "logits": logits_in(folder)}, expected)
    return folder, expected


if __name__ == "__main__":
    run_command(main)
