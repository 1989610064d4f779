"""Training commands are timed by what they write."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_jax.config.yaml_io import load_config

FOLDER = Path(__file__).parents[1] / "profiling"
ONE_EACH_50_MS = """
import sys, time
for step in range({steps}):
    time.sleep(0.05)
    print("completed step:", step, flush=True)
print("no more", flush=True)
time.sleep({then})
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("bench_peers")


def command_of(peers: Any, **settings: Any) -> Any:
    return peers.Peer([sys.executable, "-c", ONE_EACH_50_MS.format(**settings)], {}, "output", "completed step: ")


def test_tokens_per_second_are_of_the_steps_after_the_first_quarter(peers: Any) -> None:
    config = load_config(overrides=["train.steps=8", "train.batch_size=2", "data.seq_len=50"])
    found = peers.timed(command_of(peers, steps=8, then=600), config)  # which is ended after its last step
    assert 0.05 < found["first_step_s"] < 60
    assert 20 < found["tokens_per_s"] < 1.1 * 100 / 0.05


def test_a_command_that_ends_too_early_is_reported(peers: Any) -> None:
    with pytest.raises(peers.StoppedError, match=r"^ended with step 3: no more$"):
        peers.timed(command_of(peers, steps=3, then=0), load_config(overrides=["train.steps=8"]))


def test_maxtext_gets_the_same_model(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(FOLDER.parent / peers.CONFIG)
    monkeypatch.setattr(peers, "_output", lambda _: "maxtext.train base.yml\n")
    command = peers.maxtext(Path("python"), config).command
    assert command[:4] == ["python", "-m", "maxtext.train", "base.yml"]
    assert {"base_emb_dim=256", "num_experts=8", "ici_expert_parallelism=8", "per_device_batch_size=1"} <= set(command)
    assert {"remat_policy=minimal_with_context", "jax_cache_dir=run/programs"} <= set(command)
    assert {"vocab_size=32000", "max_target_length=256", "capacity_factor=1.25", "dtype=float32"} <= set(command)


def test_no_maxtext_is_one_line(peers: Any, tmp_path: Path) -> None:
    config = load_config(FOLDER.parent / peers.CONFIG)
    with pytest.raises(peers.StoppedError, match=r"has no MaxText: see docs/measure.md"):
        peers.maxtext(Path(sys.executable), config)
    with pytest.raises(peers.StoppedError, match=r"does not run .*: name the python of an environment$"):
        peers.maxtext(tmp_path / "python", config)
