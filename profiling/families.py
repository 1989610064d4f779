"""Do all families compute what transformers computes? python profiling/families.py --transformers PYTHON [FAMILY …]

PYTHON is the interpreter of an environment with torch, transformers and safetensors. Each model of tests/golden is
imported, and its logits are compared with those that transformers computed when it was made. It is exported again, and
transformers' logits for the export are compared with them, too (tests/golden/check.py). Both generate tokens greedily
after two prompts of different lengths (tests/golden/greedy.py), here as one batch. Writes results/families.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from results_file import rounded, with_earlier, write_result
from with_transformers import GOLDEN, asked_families, call, differences, versions

from moe_jax.config import Config, DataConfig, TrainConfig
from moe_jax.convert import deepseek_v32
from moe_jax.convert.families import FAMILIES, family_of, family_that_holds
from moe_jax.convert.hf_config import read_config
from moe_jax.convert.write import write_model
from moe_jax.errors import run_command
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.sampling_mesh import SamplingMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.convert.golden import expected, logits_in, model_of, read

PROMPTS, TOKENS = (8, 13), 40


def main() -> None:
    """Import, export, generate, compare, and write the result."""
    python, named = asked_families("families", __doc__)
    names = named or [*FAMILIES, *deepseek_v32.FAMILIES]
    found = {name: _logits(name) for name in names}
    with tempfile.TemporaryDirectory() as home:
        pairs = {name: (_exported(name, Path(home) / name), GOLDEN / name / "golden.safetensors") for name in names}
        for name, compared in differences(python, pairs).items():
            found[name]["exported_difference"] = compared["largest_difference"]
    lengths, folders = ",".join(map(str, PROMPTS)), (str(GOLDEN / name) for name in names)
    lines = call(python, str(GOLDEN / "greedy.py"), str(TOKENS), lengths, *folders).splitlines()
    for name, line in zip(names, lines, strict=True):
        texts, own = json.loads(line), _greedy(name)
        found[name]["greedy_tokens"] = sum(map(len, texts))
        found[name]["greedy_is_equal"] = texts == own
    about = {"prompts": PROMPTS, "tokens_at_most": TOKENS} | versions(python)
    write_result(
        "families", with_earlier("families", "families", found, about) if named else about | {"families": found}
    )


def _logits(name: str) -> dict[str, Any]:
    _, golden = expected(name)
    difference = np.abs(logits_in(GOLDEN / name) - golden).max()
    return {"largest_logit": rounded(float(np.abs(golden).max())), "largest_difference": rounded(float(difference))}


def _exported(name: str, folder: Path) -> Path:
    model = model_of(name)
    dtype = "bfloat16" if name == "mixtral" else "float32"
    family = family_that_holds(model, family_of(read_config(GOLDEN / name)).model_type)
    write_model(folder, model, family, read(GOLDEN / name), dtype, 64, GOLDEN / name, 10**9)
    return folder


def _greedy(name: str) -> list[list[int]]:
    """Return the tokens after each prompt, generated as one batch."""
    config = Config(model=model_of(name), data=DataConfig(seq_len=64), train=TrainConfig(compute_dtype="float32"))
    prompts = [tokens[:length].tolist() for tokens, length in zip(expected(name)[0], PROMPTS, strict=True)]
    ends = read_config(GOLDEN / name).token_ids("eos_token_id")["eos_token_id"]
    where = SamplingMesh.of(config)
    decoder = Decoder(where, where.placed(read(GOLDEN / name)), Sampling())
    generation = Generation.of(decoder, prompts, TOKENS, seed=0, ends=[ends] if isinstance(ends, int) else ends or ())
    while not generation.is_done:
        generation.advance()
    return [row.new for row in generation.rows]


if __name__ == "__main__":
    run_command(main)
