"""What was measured of balance and migration bears what the documentation says of it."""

from typing import Any

import pytest

from tests.results import percent, result, rows


def seeds_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [values for name, values in run.items() if name.startswith("seed")]


def test_biases_balance_as_well_as_the_loss_does_and_cost_nothing() -> None:
    runs = result("balance")["runs"]
    with_loss, with_bias, neither = (
        seeds_of(runs[name]) for name in ("load-balance loss", "bias, rate 0.01", "neither")
    )
    assert max(seed["load_max_over_mean"] for seed in with_bias) <= 1.2 < 2 < neither[0]["load_max_over_mean"]
    reached, wanted = (sum(seed["validation_loss"] for seed in seeds) / 2 for seeds in (with_bias, with_loss))
    spread = abs(with_loss[0]["validation_loss"] - with_loss[1]["validation_loss"])
    assert abs(reached - wanted) < spread, "seeds differ more"


def test_the_page_of_balance_has_what_was_measured() -> None:
    runs, reported = result("balance")["runs"], rows("balance")
    for name, row in (
        ("load-balance loss", "load-balance loss, weight 0.01"),
        ("bias, rate 0.01", "bias, rate 0.01, no loss"),
        ("neither", "neither"),
    ):
        seeds = seeds_of(runs[name])
        of_steps = [max(seed["load_max_over_mean_of_a_step_of_each_block"]) for seed in seeds]
        assert reported[row] == [
            " / ".join(f"{seed['validation_loss']:.3f}" for seed in seeds),
            " / ".join(f"{seed['load_max_over_mean']:.2f}" for seed in seeds),
            " / ".join(f"{load:.2f}" for load in of_steps),
            " / ".join(percent(seed["dropped_fraction"]) for seed in seeds),
            " / ".join(percent(seed["dropped_fraction_of_all_steps"]) for seed in seeds),
        ]


def test_one_move_balances_ranks_and_changes_no_loss() -> None:
    found = result("migration")
    (move,) = found["moves"]
    assert min(move["rank_load"]) >= 2.0
    after = [loads for step, loads in found["rank_load_max_over_mean"].items() if int(step) > move["step"]]
    assert len(after) == 3
    assert max(map(max, after)) <= 1.15
    assert found["curves_equal_bit_for_bit"]
    assert found["curves"] == {"loss": 250, "grad_norm": 250, "load_balance_loss": 250, "validation_loss": 1}
    assert found["overhead"] + found["step_on_over_off"]["median"] - 1 <= 0.05
    assert found["bytes_of_each"] == [found["expert_bytes_predicted"]]
    assert move["migration_bytes"] == found["sends"][0] * found["expert_bytes_predicted"]


def test_the_page_of_migration_has_what_was_measured() -> None:
    found, reported = result("migration"), rows("migration")
    ratio = found["step_on_over_off"]
    (move,) = found["moves"]
    worst = [max(loads) for step, loads in found["rank_load_max_over_mean"].items() if int(step) > move["step"]]
    expected = {
        "load of the busiest rank / mean, steps 51 to 100": "{:.2f} and {:.2f} in the two blocks".format(
            *move["rank_load"]
        ),
        f"after one move of {sum(move['migration_swaps'])} pairs of experts, as planned": ", ".join(
            f"{load:.2f}" for load in move["migration_load_after"]
        ),
        "the same, measured in the 150 steps after it": f"{min(worst):.2f} to {max(worst):.2f}",
        "rebalancing checks and the move, of the time of all steps": percent(found["overhead"]),
        "step time with a placement / without, interleaved": (
            f"{ratio['median']:.3f} ({ratio['first_quartile']:.3f}–{ratio['third_quartile']:.3f}) ×"
        ),
        "bytes that left each device": f"{move['migration_bytes'] / 1e6:.1f} MB, {found['sends'][0]} such",
    }
    assert {name: reported[name] for name in expected} == {name: [value] for name, value in expected.items()}


def test_steps_get_faster_after_a_migration_as_predicted() -> None:
    """Two processes in one box; a twentieth is what rounds differ by."""
    found = result("migration_box")
    assert all(before > 1.5 > 1.01 > after for before, after in found["rank_load_max_over_mean"])
    assert found["speedup"]["median"] == pytest.approx(found["speedup_predicted"]["median"], rel=0.05)
    assert found["move_s"]["median"] == pytest.approx(found["move_s_predicted"]["median"], rel=0.05)
    assert found["bytes_on_the_wire"] == pytest.approx(found["bytes_of_a_device_predicted"], rel=0.02)
    measured, predicted = found["speedup"], found["speedup_predicted"]
    assert rows("migration")["step"] == [
        f"{found['step_s']['uneven_s']['median']:.2f} s before, {found['step_s']['even_s']['median']:.2f} s after: "
        f"{measured['median']:.2f} ({measured['first_quartile']:.2f}–{measured['third_quartile']:.2f}) × the speed",
        f"{predicted['median']:.2f} ({predicted['first_quartile']:.2f}–{predicted['third_quartile']:.2f}) ×",
    ]


def test_uneven_shares_speed_up_steps_as_planned() -> None:
    """Two processes in one box, one of which has half of the other's CPU time; a twentieth is what rounds differ by."""
    found = result("rank_speeds_box")
    ratio, step_s, planned_s = found["uneven_over_equal"], found["step_s"], found["step_s_planned"]
    assert ratio["third_quartile"] < 0.9
    assert ratio["median"] == pytest.approx(found["uneven_over_equal_planned"], rel=0.05)
    fast, slow = (f"{rate['median']:.1f}" for rate in found["matrix_gflops"])
    table = rows("migration")
    assert table["rate of matrix products"] == [f"{fast} and {slow} GFLOP/s", "as measured"]
    for name, experts in (("equal", (8, 8)), ("uneven", found["experts_of_ranks"])):
        row = table["step with {} and {} experts".format(*experts)]
        assert row == [f"{step_s[name]['median']:.2f} s", f"{planned_s[name]:.2f} s"]
    spread = f"{ratio['first_quartile']:.2f}–{ratio['third_quartile']:.2f}"
    planned = f"{found['uneven_over_equal_planned']:.2f}"
    assert table["uneven / equal shares"] == [f"{ratio['median']:.2f} ({spread})", planned]
    assert found["shares"] == [0.5, 0.25]
