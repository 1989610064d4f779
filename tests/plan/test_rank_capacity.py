"""Loads of expert ranks in plans: buffers for them, their price, and the time of the busiest rank."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from moe_jax.cli import plan as command
from moe_jax.config.draft import open_draft
from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.planner import PlanError, plan
from moe_jax.plan.rank_capacity import factor_for, prices, with_load

NODE = find_cluster("h100x8")
DROPLESS = [
    *("model.hidden_size=1024", "model.num_layers=2", "model.num_attention_heads=8", "model.moe.num_experts=16"),
    *("model.moe.capacity_factor=null", "model.moe.intermediate_size=4096", "data.seq_len=1024", "train.batch_size=64"),
    *("mesh.data=1", "mesh.expert=8"),
]


def test_a_buffer_holds_its_load_with_room() -> None:
    assert [factor_for(load) for load in (1.0, 1.05, 1.3, 1.8, 2.5, 9.0)] == [1.1, 1.25, 1.5, 2.0, 3.0, 10.0]


def test_a_load_sets_the_buffer_unless_one_is_given() -> None:
    chosen = with_load(open_draft(load_draft(None, DROPLESS)), 1.3)
    assert (chosen.exchange.rank_capacity_factor, chosen.plan.load_factor) == (1.5, 1.3)
    given = with_load(open_draft(load_draft(None, [*DROPLESS, "exchange.rank_capacity_factor=4"])), 1.3)
    assert given.exchange.rank_capacity_factor == 4
    slots = with_load(open_draft(load_draft(None, [*DROPLESS, "model.moe.capacity_factor=1"])), 1.3)
    assert slots.exchange.rank_capacity_factor == load_config(None, DROPLESS).exchange.rank_capacity_factor


def test_a_step_waits_for_the_busiest_rank_up_to_its_buffer() -> None:
    def compute_s(*settings: str) -> float:
        return estimate(load_config(None, [*DROPLESS, *settings]), NODE).busy.compute

    even = compute_s()
    assert compute_s("plan.load_factor=1.5") > 1.1 * even
    assert compute_s("plan.load_factor=9") == compute_s("plan.load_factor=3"), "a buffer holds three times the mean"
    slots = "model.moe.capacity_factor=1"
    assert compute_s(slots, "plan.load_factor=2") == compute_s(slots), "experts with a capacity compute all their slots"
    alone = ("mesh.data=8", "mesh.expert=1")
    assert compute_s(*alone, "plan.load_factor=2") == compute_s(*alone), "a rank with all experts has the mean load"
    two = ("mesh.data=4", "mesh.expert=2", "exchange.rank_capacity_factor=null")
    assert compute_s(*two, "plan.load_factor=9") == compute_s(*two, "plan.load_factor=2"), "every choice at one of two"


def test_smaller_buffers_cost_less_time_and_memory() -> None:
    found = list(prices(estimate(load_config(None, [*DROPLESS, "plan.load_factor=1.2"]), NODE)))
    assert [each.factor for each in found] == [2.0, 1.5, 1.25], "none is below the load"
    assert [each.step_s for each in found] == sorted((each.step_s for each in found), reverse=True)
    assert [each.memory_bytes for each in found] == sorted((each.memory_bytes for each in found), reverse=True)


def test_a_load_is_a_number_or_the_last_of_a_run(tmp_path: Path) -> None:
    records = ({"step": 1, "load_max_over_mean": 3.5}, {"step": 2, "load_max_over_mean": 1.75}, {"step": 3})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 4, "lo')
    assert command._load("1.8") == 1.8
    assert command._load(str(tmp_path)) == 1.75


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("0.5", "--load-factor=0.5 must be at least 1"),
        ("nan", "--load-factor=nan must be a finite number"),
        ("", "--load-factor  is no number and no folder of a run: use e.g. 1.5 "),
        ("runs/none", r"--load-factor runs/none is no number .*: use e.g. 1.5 \(run runs/none does not exist: "),
    ],
)
def test_other_loads_are_refused(load: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command._load(load)


def test_a_plan_prints_what_smaller_buffers_would_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text("model: {moe: {capacity_factor: null}}\ndata: {seq_len: 128}\n")
    monkeypatch.chdir(tmp_path)
    closed = ["mesh.tensor=1", "mesh.context=1", "mesh.pipeline=1", "mesh.data=1", "schedule.policy=vanilla"]
    monkeypatch.setattr(sys, "argv", ["plan", "--model", "tiny.yaml", "--cluster", "h100x4", *closed])
    command.main()
    printed = capsys.readouterr().out
    assert printed.startswith(
        "batch       train.batch_size=512: tiny.yaml gives none, so each device has 16,384 tokens"
    )
    assert (
        "buffers     exchange.rank_capacity_factor=3: 3 times the rows that exist are sent. This mesh with 2: "
        in printed
    )


def test_a_mesh_that_smaller_buffers_make_fit_is_refused_with_their_factor() -> None:
    """The mesh that DeepSeek-V3 was trained on, also with a load that the buffers have to hold."""
    settings = ["train.batch_size=15360", "mesh.data=2", "mesh.expert=64", "mesh.pipeline=16"]
    fixed = {setting.partition("=")[0] for setting in settings}
    draft = open_draft(load_draft("configs/models/deepseek_v3.yaml", settings), fixed=fixed)
    cluster = find_cluster("h100x2048")
    cure = r"has enough memory.*; or use exchange\.rank_capacity_factor=2\.0, and drop the rows beyond it$"
    with pytest.raises(PlanError, match=cure):
        plan(draft, cluster)
    loaded = dataclasses.replace(draft, plan=dataclasses.replace(draft.plan, load_factor=2.5))
    with pytest.raises(PlanError, match=r"has enough memory, with train\.batch_size=\d+$"):
        plan(loaded, cluster)
    exchange = dataclasses.replace(draft.exchange, rank_capacity_factor=2.0)
    assert plan(dataclasses.replace(draft, exchange=exchange), cluster).ranked
