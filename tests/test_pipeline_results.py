"""What docs/context.md and docs/pipelines.md claim of pipelines and rings, compared with the committed results."""

import pytest

from tests.results import percent, result, rows


@pytest.mark.parametrize("target", ["h100_1x1x8", "v5p_2x2x2"])
def test_all_transfers_of_a_ring_run_concurrently_with_products(target):
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
    buffers = {name: row["in_flight_bytes"] for name, row in found["schedules"].items()}
    assert buffers["1f1b"] <= 0.6 * buffers["gpipe"]
    if target.startswith("h100"):
        assert activations["1f1b"] <= 0.6 * activations["gpipe"]
        assert activations["zero_bubble"] <= 1.1 * activations["1f1b"]
    else:
        assert activations["1f1b"] < activations["zero_bubble"] <= activations["gpipe"]


PIPELINES_IN_A_BOX = {
    "1f1b": "`1f1b`, blocks uncut",
    "1f1b+unified": "`1f1b`, `unified` in two",
    "gpipe": "`gpipe`, uncut",
    "coscheduled": "`coscheduled`, uncut",
    "coscheduled+unified": "`coscheduled`, `unified` in two",
}


def test_co_scheduling_is_faster_in_wall_clock_time():
    found = result("pipeline_box")["variants"]
    assert found["coscheduled"]["speed_up_over_1f1b"]["median"] >= 1.25
    assert (
        found["coscheduled+unified"]["speed_up_over_1f1b"]["median"]
        > found["1f1b+unified"]["speed_up_over_1f1b"]["median"]
    )


@pytest.mark.parametrize("name", PIPELINES_IN_A_BOX)
def test_the_page_of_pipelines_has_what_was_measured_in_a_box(name):
    row = result("pipeline_box")["variants"][name]
    idle, faster = row["bubble"], row["speed_up_over_1f1b"]
    quartiles = f"{faster['median']:.2f} ({faster['first_quartile']:.2f}–{faster['third_quartile']:.2f})"
    assert rows("pipelines")[PIPELINES_IN_A_BOX[name]] == [
        f"{row['step_s']['median']:.1f}",
        "1" if name == "1f1b" else quartiles,
        *(percent(idle[what]) for what in ("measured", "formula", "own_slots", "own_slots_and_sends")),
    ]
    assert 0.9 < idle["measured"] / idle["own_slots_and_sends"] < 1.1
