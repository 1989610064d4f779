"""The commands from end to end, in this process, on one tiny run: what they leave, print and compute."""

import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_jax.checkpoint.load import load_params
from moe_jax.cli import generate
from moe_jax.cli import train as training
from moe_jax.config.yaml_io import load_config
from moe_jax.data.loader import validation_batches
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.models.parameters import param_shapes
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from tests import references
from tests.run.whole_runs import compiled_once

LETTERS = "abcdefgh"  # a text of these is soon learnt so far that nothing else is sampled: every token is a character
STEPS, SAMPLE = 40, 30
CONFIG = {
    "model": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "moe": {"num_experts": 4, "intermediate_size": 12, "moe_layer_freq": 2, "capacity_factor": None},
    },
    "mesh": {"cpu_devices": 8, "data": 2, "expert": 4},
    "data": {"path": "text.txt", "seq_len": 16},
    "optimizer": {"learning_rate": 0.05, "warmup_steps": 0},
    "train": {"steps": STEPS, "batch_size": 8, "compute_dtype": "float32", "eval_every": 0, "eval_batches": 3},
    "log": {"dir": "run", "sample_prompt": "ab", "sample_tokens": SAMPLE},
}


def printed(main: Callable[[], None], *arguments: str) -> str:
    """What a command prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "argv", ["command", *arguments])
        main()
    return output.getvalue()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory):
    """The current folder of these tests, with a text and an experiment."""
    folder = tmp_path_factory.mktemp("commands")
    letters = np.random.default_rng(0).choice(list(LETTERS), 5000)
    (folder / "text.txt").write_text("".join(letters))
    (folder / "tiny.yaml").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch, compiled_once():
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    """What training printed; the run is in `run`."""
    return printed(training.main, "--config", "tiny.yaml")


def trained_params():
    """The parameters of the run, on one device."""
    placed = jax.sharding.NamedSharding(one_device_mesh(), REPLICATED)
    shapes = param_shapes(load_config("run").model)
    on_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    return load_params(Path("run"), on_device)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records() -> list[dict]:
    return [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_in_its_folder(output):
    run = Path("run")
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "sample.txt",
        "report.html",
        "tensorboard",
        "checkpoints",
    }
    assert load_config(run) == load_config("tiny.yaml")
    assert json.loads((run / "provenance.json").read_text())["mesh"].items() >= {"data": 2, "expert": 4}.items()
    assert [record["step"] for record in records() if "loss" in record] == [1, 10, 20, 30, 40]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(STEPS)]
    assert any((run / "tensorboard").iterdir())
    sample = (run / "sample.txt").read_text()
    assert len(sample) == 2 + SAMPLE
    assert sample.startswith("ab")
    assert set(sample) <= set(LETTERS), "the model has learnt which letters there are"
    assert output.endswith(f"{sample}\nreport: run/report.html\n")
    assert f"step {STEPS}/{STEPS}" in output


def test_a_finished_run_started_again_trains_no_further(output):
    before, config = records(), Path("run", "config.yaml").read_text()
    again = printed(training.main, "--config", "run", "exchange.algorithm=ring", "optimizer.learning_rate=0.5")
    assert "changed since" not in again
    assert Path("run", "config.yaml").read_text() == config, "it still says what trained the model"
    assert f"log.dir=run is already trained to step {STEPS}: set train.steps higher to continue\n" in again
    assert records() == before
    assert [path.name for path in Path("run", "checkpoints").iterdir()] == [str(STEPS)]


def test_a_dry_run_prints_the_facts_and_writes_nothing(output, folder):
    before = tree(folder)
    facts = printed(training.main, "--config", "run", "--dry-run", "log.dir=elsewhere")
    rows = dict(line.split(maxsplit=1) for line in facts.splitlines())
    assert rows["run"] == f"elsewhere, from step 0 to {STEPS}"
    assert rows["devices"].startswith("8 × ")
    assert {"data=2", "expert=4"} <= set(rows["mesh"].split(" × "))
    assert rows["blocks"] == "dense moe"
    assert rows["parameters"].startswith(f"{sum(x.size for x in jax.tree.leaves(trained_params())):,} (")
    assert rows["tokens"] == f"{STEPS * 8 * 16:,}, {8 * 16} in each step"
    assert rows["temporaries"].endswith("as compiled")
    assert re.search(
        r"\nstep time +about .* if all were as fast as one large matrix product was here: .* at 1e\+12 ", facts
    )
    assert tree(folder) == before
    assert not Path("elsewhere").exists()


def test_validation_loss_is_the_mean_cross_entropy_of_the_reference(output):
    """Without the auxiliary losses, and on batches of the text that training never sees."""
    config = load_config("run")
    (tokens,) = open_tokens(config.data, config.model.vocab_size)
    batches = validation_batches(
        Samples.of(tokens, "validation", config.data),
        batch_size=config.train.batch_size,
        num_batches=config.train.eval_batches,
        rows=[range(config.train.batch_size)],
    )
    no_auxiliary = dataclasses.replace(config.model.moe, aux_loss_coeff=0.0, z_loss_coeff=0.0)
    model, params = dataclasses.replace(config.model, moe=no_auxiliary), jax.device_get(trained_params())
    losses = [references.objective(params, batch, model, sources=1)[0] for batch in batches]
    assert len(losses) > 0
    validated = [record for record in records() if "validation_loss" in record]
    assert [record["step"] for record in validated] == [config.train.steps]
    np.testing.assert_allclose(validated[0]["validation_loss"], np.mean(losses), rtol=1e-5)


def test_generate_continues_the_prompt_and_is_a_function_of_the_seed(output):
    def text(seed: int) -> str:
        return printed(generate.main, "--run", "run", "--prompt", "hab", "--tokens", "25", "--seed", str(seed))

    first = text(1)
    assert first.startswith("hab")
    assert len(first) == 3 + 25 + 1
    assert first.endswith("\n")
    assert set(first.strip()) <= set(LETTERS)
    assert text(1) == first
    assert text(2) != first
