"""What docs/compiled.md claims of runs and reports with XLA:GPU, compared with the committed result."""

from tests.results import percent, result, rows

H200 = "same_program_h200_1x1x8"


def told(way: str) -> list[str]:
    """The cells of a row: the program, and what is exposed."""
    found = result(H200)[way]
    exposed = f"{found['exposed_ms']:.2f} of {found['communication_ms']:.2f} ms, {percent(found['exposed_share'])}"
    return [f"`{found['sha256'][:12]}`", exposed]


def test_a_run_trains_the_program_that_the_report_shows() -> None:
    found, cells = result(H200), rows("compiled")
    assert found["same"]
    assert found["run"] == found["report"]
    assert cells["8 H200, as the report compiles it"] == told("report")
    assert cells["8 H200, as a run compiles it"] == told("run")


def test_the_second_compilation_hides_most_of_what_the_first_one_exposed() -> None:
    found = result(H200)
    assert rows("compiled")["8 H200, compiled once"] == told("compiled_once")
    assert found["run"]["exposed_ms"] < found["compiled_once"]["exposed_ms"] / 3
