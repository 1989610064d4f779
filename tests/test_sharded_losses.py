"""Losses with fully sharded parameters in docs/fully_sharded.md are those of sharded_losses.json in profiling/results,
of the meshes on which steps are compared with the reference."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))  # its programs find each other there
import sharded_losses

from tests.results import ROOT, result
from tests.step import pipeline_settings, step_settings

MESHES = result(sharded_losses.NAME)["meshes"]


def test_the_table_is_that_of_the_script() -> None:
    assert "\n".join(sharded_losses.table(MESHES)) in (ROOT / "docs/fully_sharded.md").read_text()


def test_every_mesh_of_the_steps_that_tests_compare_has_trained() -> None:
    assert set(step_settings.FACTORS["mesh"].values()) < set(sharded_losses.MESHES)
    axes = [
        {frozenset(re.findall(r"mesh\.(\w+)=[2-9]", mesh)) for mesh in meshes}  # of several ranks
        for meshes in (sharded_losses.PIPELINES, pipeline_settings.FACTORS["mesh"].values())
    ]
    assert axes[0] == axes[1]
    assert {row: list(by_step) for row, by_step in MESHES.items()} == {
        row: list(by_step) for row, by_step in sharded_losses.cases().items()
    }


def test_losses_fall_and_are_those_of_whole_parameters() -> None:
    for row, by_step in MESHES.items():
        for step, found in by_step.items():
            assert not sharded_losses.is_too_far(found, step), (row, step)
            assert found["last_loss"] < 0.8 * found["first_loss"], (row, step)
