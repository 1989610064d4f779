"""Evaluation of checkpoints: the same losses as validation during training, and each token of a text once."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moe_jax.cli import evaluate
from moe_jax.cli.evaluate import _freed
from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config, to_yaml
from moe_jax.data.prepare import prepare_text
from moe_jax.data.samples import Samples
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.models.parameters import stored
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.evaluation import Checkpoint, Result, Text, evaluate_texts
from moe_jax.run.loop import train
from moe_jax.step.context import StepContext
from tests.models.test_decode import logits_of
from tests.run.whole_runs import compiled_once, config_of
from tests.small import first_params, small_config

SETTINGS = {
    "model": {
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_size": 24,
        "moe": {"num_experts": 8, "intermediate_size": 12, "moe_layer_freq": 2},
    },
    "mesh": {"cpu_devices": 8, "data": 2, "expert": 4},
    "data": {"seq_len": 16},
    "train": {"steps": 4, "batch_size": 8, "compute_dtype": "float32", "eval_every": 2, "eval_batches": 3},
    "checkpoint": {"every": 2},
    "log": {"every": 1, "tensorboard": False, "sample_tokens": 0},
}


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluated(run: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict:
    """The record that an evaluation adds to the run's metrics."""
    before = records_of(run)
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run), *arguments])
    evaluate.main()
    (added,) = [record for record in records_of(run) if record not in before]
    return added


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "upper.jsonl").write_text('{"text": "TO BE OR NOT"}\n' * 200)
    (folder / "lower.jsonl").write_text('{"text": "that is the question"}\n' * 200)
    for name in ("upper", "lower"):
        prepare_text(folder / f"{name}.jsonl", folder / name)
    return folder


def run_of(folder: Path, *overrides: str) -> Path:
    with compiled_once():
        train(config_of(folder, SETTINGS, *overrides))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose capacity changes before its last validation."""
    return run_of(tmp_path_factory.mktemp("plain") / "run", "model.moe.capacity_schedule=[[3, 4.0]]")


def test_a_checkpoint_has_the_loss_of_its_validation_bit_for_bit(plain: Path, monkeypatch, capsys) -> None:
    validated = {r["step"]: r["validation_loss"] for r in records_of(plain) if "validation_loss" in r}
    assert list(validated) == [2, 4]
    assert validated[2] != validated[4]
    for step, loss in validated.items():
        added = evaluated(plain, monkeypatch, "--step", str(step))
        assert added["evaluation/validation/loss"] == loss
        assert added["step"] == step
        assert added["evaluation/validation/tokens"] == 3 * 8 * 16
        assert added["evaluation/validation/bits_per_byte"] == pytest.approx(loss / np.log(2)), "a token is a byte"
    assert f"{validated[4]:.4f}" in capsys.readouterr().out
    assert [record["step"] for record in records_of(plain)] == sorted(r["step"] for r in records_of(plain))


AVERAGE = ("optimizer.ema_decay=0.5", "optimizer.zero=2")
MOVES = ("migration.every=1", "migration.patience=1", "migration.threshold=1.05", "migration.payback_steps=null")
MOVED = ("migration.enabled=true", *MOVES, "optimizer.zero=3")


@pytest.mark.parametrize("settings", [AVERAGE, MOVED], ids=["average", "moved"])
def test_sources_documents_averages_and_moved_experts_too(settings, texts: Path, tmp_path: Path, monkeypatch) -> None:
    sources = ", ".join(f"{{path: {texts}/{name}, weight: {weight}}}" for name, weight in (("upper", 3), ("lower", 1)))
    run = run_of(
        tmp_path / "run",
        *("data.path=null", f"data.sources=[{sources}]", "data.mask_documents=true"),
        *settings,
    )
    validated = next(r for r in records_of(run)[::-1] if "validation_loss" in r)
    assert any("migrated_blocks" in record for record in records_of(run)) == (settings is MOVED)
    added = evaluated(run, monkeypatch, *(["--ema"] if settings is AVERAGE else []))
    assert added["evaluation/validation/loss"] == validated["validation_loss"]
    for name in ("upper", "lower"):
        assert added[f"evaluation/validation/{name}/loss"] == validated[f"validation_loss/{name}"]
    if settings is AVERAGE:
        assert evaluated(run, monkeypatch)["evaluation/validation/loss"] != added["evaluation/validation/loss"]


def test_blocks_of_pipeline_stages_are_evaluated_on_one_device(tmp_path: Path, monkeypatch) -> None:
    """To round-off: the sums have another order. Nothing is dropped, which would depend on the mesh."""
    dropless = ("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "model.moe.moe_layer_freq=1")
    stages = ("mesh.data=1", "mesh.expert=2", "mesh.pipeline=2", "mesh.cpu_devices=8", "model.num_layers=4")
    run = run_of(tmp_path / "run", *dropless, *stages, "mesh.tensor=2", "schedule.pipeline=zero_bubble")
    loss = next(r["validation_loss"] for r in records_of(run)[::-1] if "validation_loss" in r)
    assert evaluated(run, monkeypatch)["evaluation/validation/loss"] == loss
    alone = ("mesh.pipeline=1", "mesh.expert=1", "mesh.tensor=1", "mesh.data=8")
    assert evaluated(run, monkeypatch, *alone)["evaluation/validation/loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_is_evaluated_on_a_mesh_that_its_settings_are_not_for(tmp_path: Path) -> None:
    of_mesh = {
        "migration.enabled=true migration.replicas=1 migration.rank_speeds=[1,0.5] model.moe.capacity_factor=null",
        "exchange.hot_experts=1 model.moe.capacity_factor=null",
        "optimizer.zero=3 optimizer.zero_axes=[data] exchange.algorithm=hier_2d exchange.ranks_per_node=2",
    }
    for settings in of_mesh:
        config = load_config(None, ["mesh.data=4", "mesh.expert=2", *settings.split()])
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        for mesh in (["mesh.expert=1"], ["mesh.expert=2", "mesh.tensor=2"], ["mesh.data=1", "mesh.expert=1"]):
            load_config(tmp_path / "config.yaml", [*_freed(mesh), *mesh])


def checkpoint_of(config: Config, params) -> Checkpoint:
    """A checkpoint of these parameters, without files."""
    sizes = [size for size in config.mesh.sizes.values() if size > 0]
    mesh = make_mesh(config.mesh, jax.devices()[: int(np.prod(sizes))])
    context = StepContext.of(config, mesh)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), context.stored_specs)
    return Checkpoint(config, mesh, 1, jax.device_put(stored(params, context.stages), placed))


@pytest.fixture(scope="module")
def sharp() -> Iterator:
    """Parameters whose losses differ from token to token."""
    config = small_config(1, 1, model={"vocab_size": 256}, capacity_factor=None)
    return jax.tree.map(lambda x: 3 * x, first_params(config.model))


def losses_of(params, config: Config, token_N1: np.ndarray) -> np.ndarray:
    """The slow reference: one sequence, one device, no padding."""
    logits = np.asarray(logits_of(params, token_N1[None, :-1], config.model), np.float64)[0]
    logits -= logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), token_N1[1:]]


@pytest.mark.parametrize("mesh", [{"data": 2, "expert": 4}, {"data": 1, "expert": 2, "context": 2, "tensor": 2}])
@pytest.mark.parametrize("length", [8 * 12 + 1, 9 * 12 + 8, 5])
def test_each_token_is_predicted_once_and_padding_does_not_count(mesh: dict, length: int, sharp) -> None:
    dropless = {"exchange": {"rank_capacity_factor": None}, "capacity_factor": None}
    config = small_config(**mesh, model={"vocab_size": 256}, **dropless)
    tokens = np.random.default_rng(length).integers(0, 255, length, dtype=np.int32)
    text = Text("text", Samples(tokens, seq_len=12), ByteTokenizer())
    (result,) = evaluate_texts(checkpoint_of(config, sharp), [text], None)
    spans = [tokens[first : first + 13] for first in range(0, length - 1, 12)]
    expected = np.concatenate([losses_of(sharp, config, span) for span in spans])
    assert result.tokens == result.text_bytes == len(expected) == length - 1
    assert result.loss == pytest.approx(expected.mean(), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected.sum() / np.log(2) / (length - 1), rel=1e-5)


def test_results_of_a_hopeless_model_are_infinite() -> None:
    assert Result("text", 1e6, 3).perplexity == np.inf
    assert Result("text", 1e6, 3).bits_per_byte is None


def test_a_text_is_read_whole_and_a_folder_has_its_validation_part(plain: Path, texts: Path, monkeypatch) -> None:
    added = evaluated(plain, monkeypatch, "--data", str(texts / "upper.jsonl"), "--data", str(texts / "upper"))
    assert added["evaluation/upper.jsonl/tokens"] == 200 * 13 - 1
    assert added["evaluation/upper/tokens"] == 20 * 13 - 1
    apart = evaluated(plain, monkeypatch, "--data", str(texts / "upper.jsonl"), "data.mask_documents=true")
    assert apart["evaluation/upper.jsonl/tokens"] == 200 * 12, "the first token of a document is not predicted"
    assert apart["evaluation_options"] == "data.mask_documents=true"
    part = evaluated(plain, monkeypatch, "--data", str(texts / "upper.jsonl"), "--batches", "2")
    assert part["evaluation/upper.jsonl/tokens"] == 2 * 8 * 16
    (texts / "short.txt").write_text("to be, or not to be")
    short = evaluated(plain, monkeypatch, "--data", str(texts / "short.txt"), "--batches", "2")
    assert short["evaluation/short.txt/tokens"] == 18, "it fills no batch"


def test_results_are_written_as_json_and_a_run_that_trains_keeps_its_metrics(
    plain: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    from moe_jax.run.run_lock import FolderLock

    before = (plain / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("moe_jax.run.run_lock.ENDING_S", 0)
    monkeypatch.setattr(sys, "argv", ["evaluate", str(plain), "--json", str(tmp_path / "found.json")])
    with FolderLock(plain):
        evaluate.main()
    assert f"not added to the run's metrics: log.dir={plain} is in use by process" in capsys.readouterr().out
    assert (plain / "metrics.jsonl").read_bytes() == before
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["step"], found["options"]) == (4, "")
    assert found["results"]["validation"].keys() == {"loss", "perplexity", "bits_per_byte", "tokens"}
