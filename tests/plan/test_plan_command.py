"""What `python -m moe_jax.plan --out` leaves: a config, what was printed, and a picture that says of what it is."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_jax.cli import plan as command
from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.plan.clusters import find_cluster

CONFIG = """
model: {hidden_size: 64, num_layers: 6, num_attention_heads: 4, moe: {num_experts: 8, top_k: 2, intermediate_size: 64}}
data: {seq_len: 128}
train: {batch_size: 32}
"""


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (
            ["mesh.pipeline=1", "train.grad_accumulation=2", "schedule.pipeline=1f1b"],
            "4 of 6 blocks, the last of 2 parts of the batch: ",
        ),
        (["mesh.pipeline=1", "train.grad_accumulation=1", "schedule.pipeline=1f1b"], "4 of 6 blocks: "),
        (
            ["mesh.pipeline=1", "train.grad_accumulation=2", "schedule.pipeline=coscheduled"],
            "3 of 6 blocks, one of 2 parts of the batch: ",
        ),
        (
            ["mesh.pipeline=2", "train.grad_accumulation=4", "schedule.pipeline=1f1b"],
            "3 of 6 blocks, one of 4 parts of the batch, on one pipeline stage: ",
        ),
    ],
)
def test_a_plan_is_written_with_a_picture_that_names_what_it_shows(
    settings: list[str],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    settings = [*settings, "schedule.policy=vanilla", "mesh.tensor=1", "mesh.context=1", "schedule.virtual_stages=1"]
    line = ["plan", "--model", "tiny.yaml", "--cluster", "h100x8", *settings, "--out", "new/plan.yaml"]
    monkeypatch.setattr(sys, "argv", line)
    titles: list[str] = []
    draw = command.draw

    def titled(bars: Any, file: Any, title: str) -> None:
        titles.append(title)
        draw(bars, file, title)

    monkeypatch.setattr(command, "draw", titled)
    command.main()
    output = capsys.readouterr().out
    assert output.endswith("wrote new/plan.yaml, new/plan.txt, new/plan.png\n")
    assert {each.name for each in Path("new").iterdir()} == {"plan.yaml", "plan.txt", "plan.png"}
    assert Path("new/plan.txt").read_text().startswith(output.partition("\n\nwrote ")[0].partition("\nwrote ")[0])
    assert Path("new/plan.png").read_bytes().startswith(b"\x89PNG")
    mesh = load_config("new/plan.yaml").mesh
    written = Path("new/plan.yaml").read_text()
    assert written.startswith("# Planned for h100x8: ")
    assert "# Set data.path before training: " not in written, "a model of bytes finds its text"
    step = re.search(r"step +(.*?) for ", output)
    assert step
    assert titles[0].startswith(f"{shown}from a step of {step[1]} on h100x8, ")
    assert mesh.data * mesh.expert * mesh.pipeline == 8


def test_a_plan_of_a_published_model_reports_that_it_has_no_data_yet() -> None:
    draft = load_draft(None, ["model.vocab_size=32000", "schedule.policy=auto", "data.seq_len=64", "mesh.data=1"])
    head = command._head(command.plan(draft, find_cluster("h100x1")))
    assert (
        "# Set data.path before training: the default is a text of bytes, and this model knows 32,000 tokens.\n" in head
    )
    assert all(line.startswith("#") for line in head.splitlines())
