"""What the benchmark of predicted steps makes of its measurements."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))  # its programs find each other there

from predicted_cases import LineTimes, LinkTimes
from predicted_steps import last_result, predicted_again
from predicted_summary import summary, table

from moe_jax.errors import ConfigError
from moe_jax.schedule.simulation import Interference


def row(mesh: str, rate: float, predicted_s: float, *measured_s: float) -> dict:
    known = {"model": "small", "mesh": mesh, "way": "vanilla", "rate_mbit": rate, "pace": 1.0}
    measured = {"times": {"tasks": {}, "rest_s": 0.1}, "link": {"alpha_s": 1e-3, "bytes_per_s": rate * 1e6 / 8}}
    return known | measured | {"predicted_s": predicted_s, "measured_s": list(measured_s)}


def test_predictions_are_compared_with_medians_and_the_first_against_the_fastest() -> None:
    rows = [
        *(row("expert", 100, 1.1, 9.0, 1.0, 0.9), row("data", 100, 2.0, 2.0)),
        *(row("expert", 800, 0.4, 0.5), row("data", 800, 0.5, 0.4)),
    ]
    found = summary(rows)
    assert [each["error"] for each in found["rows"]] == pytest.approx([0.1, 0, -0.2, 0.25])
    assert found["median_error"] == pytest.approx(0.15)
    assert found["ninth_decile_of_errors"] == pytest.approx(0.235)
    assert {name: case["over_fastest"] for name, case in found["cases"].items()} == {
        "small, 100 Mbit/s": 0,
        "small, 800 Mbit/s": pytest.approx(0.25),
    }
    assert found["ranked_first_within_3_percent"] == 0.5
    assert found["known"]["small, data"]["links"].keys() == {"100", "800"}
    assert table(found).splitlines()[-1].startswith("4 configurations: median error 15.0%, nine in ten up to 23.5%")


def test_neighbours_have_a_link_of_their_own() -> None:
    line = LineTimes(alpha_s=1e-3, bytes_per_s=1e7, busy_s=2e-3, slowdown=1.1)
    known = {"between": line, "start": (0.0, 0.0), "finish": (0.0, 0.0)}
    (one,) = LinkTimes(**known).cluster().levels
    assert (one.devices, one.bytes_per_s) == (2, 1e7)
    near = LineTimes(alpha_s=1e-3, bytes_per_s=1e8, busy_s=1e-3, slowdown=0.9)
    cluster = LinkTimes(**known, in_node=near).cluster()
    node, between = cluster.levels
    assert (node.devices, node.bytes_per_s, between.devices, between.bytes_per_s) == (2, 1e8, 4, 1e7)
    assert cluster.interference == Interference(slowdown=(1.1, 1.0), start_s=(2e-3, 1e-3))


@pytest.mark.parametrize("name", ["predicted_steps", "predicted_streams"])
def test_the_result_has_what_the_planner_predicts_from_its_measurements(name: str) -> None:
    result = json.loads((Path(__file__).parents[1] / f"profiling/results/{name}.json").read_text())
    again = [row["predicted_s"] for row in predicted_again(result)]
    assert again == pytest.approx([row["predicted_s"] for row in result["rows"]], rel=2e-3)


@pytest.mark.parametrize(
    "content", [None, '{"rows": []}', '{"known": {"small, data": {"links": {"100": {"alpha_s": 0.1}}}}}']
)
def test_a_result_without_measurements_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "predicted_steps.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--predict: predicted_steps\.json has no measurements"):
        last_result(path)
