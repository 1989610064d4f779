"""Whole runs that record the experts of their tokens, and runs that replay them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax.config import Config
from moe_jax.errors import ConfigError, DataError
from moe_jax.run.loop import train
from tests.run.test_evaluation import SETTINGS, records_of
from tests.run.whole_runs import config_of

DROPLESS = ("model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "checkpoint.every=2")
OTHER = ("mesh.data=1", "mesh.expert=8", "schedule.policy=unified", "mesh.cpu_devices=8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with its record; its second half is of a resumed run."""
    folder = tmp_path_factory.mktemp("recorded")
    for steps in (2, 4):
        words = (*DROPLESS, f"train.steps={steps}", "optimizer.schedule=constant")
        train(config_of(folder / "run", SETTINGS, *words, f"train.record_routing={folder}/record"))
    return folder


def replaying(folder: Path, name: str, *words: str) -> Config:
    own = (*DROPLESS, "optimizer.schedule=constant", f"train.replay_routing={folder}/record")
    return config_of(folder / name, SETTINGS, *own, *words)


def experts(folder: Path) -> np.ndarray:
    return np.stack([np.load(folder / f"{step:08}.npy") for step in range(1, 5)])


def test_a_run_on_another_mesh_replays_a_record_bit_for_bit(recorded: Path) -> None:
    assert experts(recorded / "record").shape == (4, 1, 8 * 16, 2)
    train(replaying(recorded, "again", *OTHER, f"train.record_routing={recorded}/again_record"))
    np.testing.assert_array_equal(experts(recorded / "again_record"), experts(recorded / "record"))
    losses = [[r["loss"] for r in records_of(recorded / name) if "loss" in r] for name in ("run", "again")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert not any("routed_experts" in record for record in records_of(recorded / "run"))


def test_experts_are_taken_from_the_record(recorded: Path, tmp_path: Path) -> None:
    """Also from a record that no gate has made."""
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / "routing.json").write_text((recorded / "record" / "routing.json").read_text())
    made = (np.arange(8 * 16 * 2).reshape(1, -1, 2) * 3 % 8).astype(np.int32)
    for step in range(1, 5):
        np.save(folder / f"{step:08}.npy", (made + step) % 8)
    train(replaying(tmp_path, "run", f"train.record_routing={tmp_path}/found"))
    np.testing.assert_array_equal(experts(tmp_path / "found"), experts(folder))


def refused(folder: Path, *words: str) -> str:
    with pytest.raises((ConfigError, DataError)) as error:
        train(replaying(folder, "refused", *words))
    return str(error.value)


def test_records_of_other_sizes_are_refused(recorded: Path, tmp_path: Path) -> None:
    record = f"train.replay_routing={recorded}/record"
    assert refused(recorded, "data.seq_len=8") == (
        f"{record} was recorded with data.seq_len=16, and this run has data.seq_len=8: use data.seq_len=16, or another "
        "folder"
    )
    assert refused(recorded, "model.moe.top_k=1").startswith(f"{record} was recorded with model.moe.top_k=2, and this")
    assert refused(recorded, f"train.record_routing={recorded}/record").endswith(": use two folders")
    assert refused(recorded, f"train.replay_routing={tmp_path}") == (
        f"train.replay_routing={tmp_path} has no routing.json: name a folder that a run with train.record_routing has "
        "written"
    )
    assert not (recorded / "refused" / "metrics.jsonl").exists()
    assert refused(recorded, "train.steps=6") == f"{record} has no step 5: set train.steps=4, or record more"


def test_a_record_of_other_text_is_refused(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded / "record", tmp_path / "record")
    facts = json.loads((tmp_path / "record" / "routing.json").read_text())
    (tmp_path / "record" / "routing.json").write_text(json.dumps(facts | {"texts": [1]}))
    assert refused(tmp_path) == (
        f"train.replay_routing={tmp_path}/record was recorded on other text than that of data.path: use the text of "
        "the record, or another folder"
    )
    (tmp_path / "record" / "routing.json").write_text("{")
    assert refused(tmp_path).startswith(f"train.replay_routing={tmp_path}/record: routing.json cannot be read (")


def test_a_record_is_of_one_run(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(recorded / "record", tmp_path / "record")
    words = (*DROPLESS, "optimizer.schedule=constant", f"train.record_routing={tmp_path}/record", "train.steps=2")
    with pytest.raises(ConfigError, match=r"has the record of log\.dir=.*/run: name another folder"):
        train(config_of(tmp_path / "other", SETTINGS, *words))
    facts = json.loads((tmp_path / "record" / "routing.json").read_text())
    (tmp_path / "record" / "routing.json").write_text(json.dumps(facts | {"log.dir": f"{tmp_path}/other"}))
    train(config_of(tmp_path / "other", SETTINGS, *words))
    assert {path.name for path in (tmp_path / "record").glob("*.npy")} == {"00000001.npy", "00000002.npy"}
    assert "removed 3 steps of an earlier start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.zeros((1, 128, 2), np.int32), "has a token with one expert twice, which no gate chooses: record it again"),
        (np.ones((1, 128, 3), np.int32), "has int32[1, 128, 3], not experts in int32[1, 128, 2]: record it again"),
        (np.full((1, 128, 2), 9, np.int32), "has expert 9, and model.moe.num_experts=8: record it again"),
        (np.ones((1, 128, 2)), "has float64[1, 128, 2], not experts in int32[1, 128, 2]: record it again"),
    ],
)
def test_damaged_records_are_refused(content: Any, reason: str, recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    facts = json.loads((recorded / "record" / "routing.json").read_text())
    (tmp_path / "record" / "routing.json").write_text(json.dumps(facts))
    for step in range(1, 5):
        np.save(tmp_path / "record" / f"{step:08}.npy", content)
    assert refused(tmp_path) == f"{tmp_path}/record/00000001.npy {reason}"
