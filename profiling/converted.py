"""Does transformers load exported models? python profiling/converted.py --transformers PYTHON [FAMILY …]

PYTHON is the interpreter of an environment with torch, transformers and safetensors. A model of each family, of another
size than those of tests/golden, is created with transformers' logits for it (tests/golden/make.py), and imported. It is
trained for 20 steps over 2 data and 4 expert ranks (without experts: 8 data ranks), and exported. transformers loads
the exports (tests/golden/check.py), without a missing or unknown tensor, and its logits are compared with those of the
trained model here. Writes results/converted.json. `families.py` exports all families without training.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import NamedSharding
from results_file import rounded, with_earlier, write_result
from safetensors.numpy import load_file, save_file
from with_transformers import GOLDEN, Pair, asked_families, call, differences, versions

from moe_jax.checkpoint.load import load_params
from moe_jax.cli import convert
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.convert import deepseek_v32
from moe_jax.convert.families import FAMILIES
from moe_jax.errors import run_command
from moe_jax.models.head import unembed
from moe_jax.models.parameters import in_order, stored_shapes
from moe_jax.models.transformer import ComputeConfig, forward
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.telemetry.run_log import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.convert.golden import logits_in

ROOT = Path(__file__).resolve().parents[1]
MORE_EXPERTS = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen2_moe": "num_experts"}  # than 4
EXPERTS, DATA, EXPERT, STEPS = 8, 2, 4, 20
VOCAB, WIDTH = 256, 24  # one token per byte; of MLPs


def main() -> None:
    """Convert, train, compare, and write the result."""
    python, named = asked_families("converted", __doc__)
    with tempfile.TemporaryDirectory() as home:
        tuned = {
            family: _trained(python, Path(home) / f"{family}-trained", family)
            for family in named or [*FAMILIES, *deepseek_v32.FAMILIES]
        }
        found = differences(python, {family: pair for family, (pair, _) in tuned.items()})
        trained = {family: facts | found[family] for family, (_, facts) in tuned.items()}
    about = {"data_ranks": DATA, "expert_ranks": EXPERT, "steps": STEPS} | versions(python)
    write_result(
        "converted", with_earlier("converted", "trained", trained, about) if named else about | {"trained": trained}
    )


def _trained(python: str, home: Path, family: str) -> tuple[Pair, dict[str, Any]]:
    settings = {"vocab_size": VOCAB, "intermediate_size": WIDTH}
    settings |= {MORE_EXPERTS[family]: EXPERTS} if family in MORE_EXPERTS else {}
    home.mkdir()
    call(python, str(GOLDEN / "make.py"), "--out", str(home), "--settings", json.dumps(settings), family)
    _convert("import", home / family, home / "run")
    shutil.copyfile(ROOT / "configs/text/shakespeare.txt", home / "text.txt")
    golden = load_file(home / family / "golden.safetensors")["logits"]
    imported = np.abs(logits_in(home / family) - golden).max()
    expert_ranks = EXPERT if load_config(home / "run").model.moe.num_experts else 1
    training = [
        *(
            f"log.dir={home / 'tuned'}",
            f"mesh.cpu_devices={DATA * EXPERT}",
            f"mesh.data={DATA * EXPERT // expert_ranks}",
            f"mesh.expert={expert_ranks}",
        ),
        *(
            f"train.steps={STEPS}",
            f"train.batch_size={DATA * EXPERT}",
            "train.compute_dtype=float32",
            "train.eval_every=0",
        ),
        *(f"data.path={home / 'text.txt'}", "data.seq_len=32", "exchange.rank_capacity_factor=null"),
        *("optimizer.warmup_steps=5", "log.every=1", "log.tensorboard=false", "log.sample_tokens=0"),
    ]
    call(sys.executable, "-m", "moe_jax.train", "--config", str(home / "run"), *training)
    losses = [record["loss"] for record in read_metrics(home / "tuned") if "loss" in record]
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 24), dtype=np.int32)
    logits = _logits(home / "tuned", tokens)
    save_file({"tokens": tokens, "logits": logits}, home / "expected.safetensors")
    _convert("export", home / "tuned", home / "hf")
    facts = {"imported_difference": float(imported), "first_loss": losses[0], "last_loss": losses[-1]}
    facts["largest_logit"] = float(np.abs(logits).max())
    pair = home / "hf", home / "expected.safetensors"
    return pair, {name: rounded(value) for name, value in facts.items()}


def _logits(run: Path, tokens: np.ndarray) -> np.ndarray:
    """Compute the logits of a run's latest parameters, on one device."""
    config, mesh = load_config(run), one_device_mesh()
    stages, placed, compute = Stages.of(config), NamedSharding(mesh, REPLICATED), ComputeConfig.of(config, mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), stored_shapes(stages))
    params = in_order(load_params(run, shapes), stages)
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": REPLICATED, "out_specs": REPLICATED, "check_vma": False}
    run_once = jax.jit(
        jax.shard_map(lambda p, t: unembed(p, forward(p, t, config.model, compute)[0], config.model), **specs)
    )
    return np.asarray(run_once(params, tokens))


def _convert(direction: str, source: Path, out: Path) -> None:
    with patch.object(sys, "argv", ["convert", direction, str(source), "--out", str(out)]):
        convert.main()


if __name__ == "__main__":
    run_command(main)
