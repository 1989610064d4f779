"""What docs/context.md and docs/pipelines.md claim of compiled programs, held against the committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "profiling" / "results"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("target", ["h100_1x1x8", "v5p_2x2x2"])
def test_all_transfers_of_a_ring_run_beside_products(target):
    ring = result(f"ring_attention_{target}")["forms"]["ring"]
    assert ring["transfers"] == ring["asynchronous"] == ring["beside_a_product"]
    assert ring["hidden"] == 1


@pytest.mark.parametrize("target", ["h100_1x1x8", "v5p_2x2x2"])
def test_pipelines_hide_and_keep_what_was_expected(target):
    found = result(f"pipeline_hlo_{target}")
    assert all(found["as_expected"].values())
    activations = {
        name: row["peak_bytes"] - row["argument_bytes"] - row["gradient_bytes"]
        for name, row in found["schedules"].items()
    }
    assert activations["1f1b"] <= 0.6 * activations["gpipe"]
    assert activations["zero_bubble"] <= 1.1 * activations["1f1b"]
