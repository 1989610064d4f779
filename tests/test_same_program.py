"""What docs/compiled.md claims of runs and reports with real compilers, compared with the committed results."""

import pytest

from tests.results import percent, result, rows

H200, V5P = "same_program_h200_1x1x8", "same_program_v5p_2x2x2"


def figures_of(name: str, way: str) -> list[str]:
    """The cells of a row: the program, and what is exposed."""
    found = result(name)[way]
    exposed = f"{found['exposed_ms']:.2f} of {found['communication_ms']:.2f} ms, {percent(found['exposed_share'])}"
    return [f"`{found['sha256'][:12]}`", exposed]


@pytest.mark.parametrize(("name", "devices"), [(H200, "8 H200"), (V5P, "8 TPU v5p, a smaller model")])
def test_a_run_trains_the_program_that_the_report_shows(name: str, devices: str) -> None:
    found, cells = result(name), rows("compiled")
    assert found["same"]
    assert found["run"] == found["report"]
    assert cells[f"{devices}, as the report compiles it"] == figures_of(name, "report")
    assert cells[f"{devices}, as a run compiles it"] == figures_of(name, "run")


@pytest.mark.parametrize(
    ("layout", "sums_of_gradients"), [("v5p_2x2x2", 3), ("v6e_2x4", 3), ("tpu7x_2x2x1", 3), ("v5e_2x4", 6)]
)
def test_exchanges_and_sums_of_gradients_are_asynchronous(layout: str, sums_of_gradients: int) -> None:
    """The sums of the head, the embedding and a block; on v5e, without a SparseCore, six of a larger model's seven."""
    found = result(f"same_program_{layout}")
    assert found["same"]
    assert found["run"] == found["report"]
    counts = found["run"]["collectives"]
    exchanges, sums = (
        [counts.get(f"{kind}, {how}", 0) for how in ("async", "sync")] for kind in ("ragged-all-to-all", "all-reduce")
    )
    reported = [str(sum(exchanges)), str(sum(sums)), str(sums[1])]
    assert rows("compiled")[layout.replace("_", ":")] == reported
    assert exchanges[1] == 0
    assert sums[0] == sums_of_gradients


def test_a_program_for_h100_is_the_same_too() -> None:
    found = result("same_program_h100_1x1x8")
    assert found["same"]
    assert found["run"] == found["report"]


def test_the_second_compilation_hides_most_of_what_the_first_one_exposed() -> None:
    found = result(H200)
    assert rows("compiled")["8 H200, compiled once"] == figures_of(H200, "compiled_once")
    assert found["run"]["exposed_ms"] < found["compiled_once"]["exposed_ms"] / 3
