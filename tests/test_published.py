"""Predictions for published runs and links: the page shows the recorded ones, and they are predicted today."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))  # its programs find each other there

import published_links
import published_runs

from moe_jax.config import Config
from moe_jax.config.attention_kernels import HOPPER
from moe_jax.config.yaml_io import load_config
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import step_memory

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/published.md").read_text()
RUNS, LINKS = (
    json.loads((ROOT / f"profiling/results/published_{name}.json").read_text()) for name in ("runs", "links")
)


def test_the_page_shows_the_tables_of_the_results() -> None:
    for program, result in ((published_runs, RUNS), (published_links, LINKS)):
        assert f"\n{program.table(result)}\n" in PAGE
        for name, address in result["sources"].items():
            assert f"\n| `{name}` | {address} |\n" in PAGE
    for name, label in (("even_rows", "even rows"), ("odd_rows", "odd rows"), ("all_rows", "all")):
        found = RUNS[name]
        numbers = (
            f"{found['runs']} | {found['median_ratio']:.2f} | {found['median_error']:.0%} | {found['worst_error']:.0%}"
        )
        assert f"\n| {label} | {numbers.replace('%', ' %')} |\n" in PAGE
    assert f"{LINKS['points']} points is {100 * LINKS['median_error']:.0f} %" in PAGE.replace("\n", " ")
    assert LINKS["median_error_of_presets"].keys() == PRESETS.keys() - {"cpu"}
    for preset, error in LINKS["median_error_of_presets"].items():
        assert f"`{preset}`" in PAGE
        assert error is None or error < 0.15


def test_links_are_predicted_as_recorded() -> None:
    given = yaml.safe_load(published_links.LINKS.read_text())
    assert given["sources"] == LINKS["sources"]
    assert [published_links.compared(link) for link in given["links"]] == LINKS["links"]


def test_runs_are_predicted_as_recorded_and_near_to_what_was_published() -> None:
    given = yaml.safe_load(published_runs.RUNS.read_text())
    assert len(given["runs"]) == len(RUNS["runs"]) >= 16
    for run, recorded in zip(given["runs"], RUNS["runs"], strict=True):
        found = published_runs.predicted(run, best=False)
        assert found | {"best": recorded["best"]} == recorded, run["name"]
    odd = RUNS["odd_rows"]
    assert 0.95 <= odd["median_ratio"] <= 1.05
    assert odd["median_error"] <= 0.15
    assert odd["worst_error"] <= 0.35


def test_a_token_is_sent_once_to_each_place_by_hand() -> None:
    """Two rows to two places: one place gets both in half of all cases, so 1.5 places get rows on average."""
    assert published_runs.rows_per_place(2, 2) == pytest.approx(2 / 1.5)
    assert published_runs.rows_per_place(8, 1) == 8


def test_the_page_on_plans_has_the_predicted_scale_and_memory() -> None:
    page = " ".join((ROOT / "docs/plan.md").read_text().split())
    assert f"the median error is {100 * RUNS['all_rows']['median_error']:.0f} % ([published.md]" in page
    mfus = []
    for data in (1, 16):
        mesh = [f"mesh.data={data}", "mesh.expert=8", "mesh.pipeline=8", "train.grad_accumulation=32"]
        config = load("deepseek_v2", [*mesh, f"train.batch_size={256 * data}"])
        frontier = find_cluster(f"mi250x-{64 * data}")
        # with flash attention, as Piper has it, which jax lacks for these GPUs
        device = dataclasses.replace(frontier.device, capability=HOPPER)
        mfus.append(estimate(config, dataclasses.replace(frontier, device=device)).mfu)
    assert f"{100 * mfus[0]:.1f} % MFU on 64 dies of Frontier (`mi250x`) and {100 * mfus[1]:.1f} % on 1,024" in page
    mesh = [
        "mesh.data=2",
        "mesh.expert=64",
        "mesh.pipeline=16",
        "train.batch_size=15360",
        "train.grad_accumulation=120",
    ]
    totals = [
        step_memory(load("deepseek_v3", [*mesh, "optimizer.zero=1", f"schedule.remat={remat}"]), "gpu").total / 1e9
        for remat in ("chunk", "full")
    ]
    assert f"takes {totals[0]:.0f} of 85 GB instead of {totals[1]:.0f}, with balanced experts" in page


def load(model: str, settings: list[str]) -> Config:
    return load_config(str(ROOT / f"configs/models/{model}.yaml"), [*settings, "exchange.rank_capacity_factor=1.0"])
