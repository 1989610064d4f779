"""A run whose data and folder are in a bucket resumes there, and ends as one on a disk does."""

import json
from pathlib import Path

import pytest

from moe_jax import paths
from moe_jax.config.yaml_io import load_config
from moe_jax.files import local_copy
from moe_jax.run import loop
from tests.object_server import Server

RECORD = "checkpoints/4/record/metadata"
CONFIG = """
model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, moe: {num_experts: 4, top_k: 2, intermediate_size: 16}}
data: {path: BUCKET/texts/fox.txt, seq_len: 16}
train: {steps: 4, batch_size: 8, compute_dtype: float32}
checkpoint: {every: 2}
log: {sample_tokens: 0, tensorboard: false, every: 1}
"""


def losses(lines: bytes) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in map(json.loads, lines.splitlines()) if "loss" in each]


@pytest.mark.parametrize("served", ["gs", "s3"], indirect=True)
def test_a_run_resumes_in_a_bucket(
    store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("BUCKET", store.bucket))
    store.objects["texts/fox.txt"] = (1, b"the quick brown fox jumps over the lazy dog\n" * 60)
    loop.train(load_config(tmp_path / "run.yaml", [f"log.dir={tmp_path}/local"]))
    config = load_config(tmp_path / "run.yaml", [f"log.dir={store.bucket}/runs/a"])
    store.faults, store.slow_s = {"unavailable": 0.002, "cut": 0.003, "slow": 0.02}, 0.05
    loop.train(config)
    del store.objects["runs/a/checkpoints/4/_CHECKPOINT_METADATA"]  # as if killed just before
    monkeypatch.setattr(local_copy, "_copies", {})  # as in another process
    paths.COPIES.clear()
    capsys.readouterr()
    loop.train(config)
    assert "resuming from step 2\n" in capsys.readouterr().out
    assert all(store.made.values()), f"faults of each kind, or this test shows less: {store.made}"
    here, there = (
        tmp_path / "local",
        {name.removeprefix("runs/a/"): value for name, (_, value) in store.objects.items()},
    )
    assert losses(there["metrics.jsonl"]) == losses((here / "metrics.jsonl").read_bytes())
    leaves = [json.loads(content)["content"]["leaves"] for content in (there[RECORD], (here / RECORD).read_bytes())]
    assert leaves[0] == leaves[1], "digests of all arrays"
    assert "lock" not in there
    assert {"config.yaml", "provenance.json"} <= there.keys()
