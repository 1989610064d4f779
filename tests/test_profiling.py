"""Programs in profiling/ start, each with that folder first on the path, and report bad input as all commands do."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_jax.errors import UserError

FOLDER = Path(__file__).parents[1] / "profiling"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def test_all_programs_can_be_loaded() -> None:
    """No file there hides a module of a library."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    load = f"import importlib, sys; sys.path.insert(0, {str(FOLDER)!r}); import jax\n"
    load += f"for name in {names}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=FOLDER.parent)
    assert run.returncode == 0, run.stderr


Call = Callable[[str], None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a program's `main` with a command line."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(line: str) -> None:
        name, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [f"profiling/{name}.py", *arguments])
        importlib.import_module(name).main()

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_reports_what_it_wants(name: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        with pytest.raises(SystemExit) as end:
            call(f"{name} {flag}")
        assert end.value.code == code
    output = capsys.readouterr()
    assert output.out.startswith(f"usage: python profiling/{name}.py")
    assert output.err.count("error: ") == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_makes_one_line_of_a_users_mistake(name: str) -> None:
    assert (FOLDER / f"{name}.py").read_text(encoding="utf-8").endswith("    run_command(main)\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("overhead 0", "ROUNDS=0 must be at least 1"),
        ("moe_vs_dense -3", "STEPS=-3 must be at least 1"),
        ("bench_step train.stepz=3", "stepz"),
        ("ring_hlo cpu:8 --slots -1", "--slots=-1 must be at least 1"),
        ("exchange_hlo cpu:8 --rows 0", "--rows=0 must be at least 1"),
        ("exchange_hlo cpu:8 --per-node 0", "--per-node=0 must be at least 1"),
        ("overlap_probe --megabytes 4 0", "--megabytes=0 must be at least 1"),
        ("pipeline_hlo cpu:8 --microbatches 0", "--microbatches=0 must be at least 1"),
        ("pipeline_hlo cpu:8 --schedules dual", "--schedules=dual is unknown: choose of gpipe, 1f1b"),
        ("pipeline_box --rounds 0", "--rounds=0 must be at least 1"),
        ("bench_peers --steps 2", "--steps=2 must be at least 8"),
        ("peers_compiled cpu:8 --maxtext python", "TARGET=cpu:8 is no TPU slice: use v5p:2x2x2"),
        ("bench_gpu --only dense", "--only=dense is unknown: choose of kernels, races, coarse, coarse-transformers, "),
        ("mutations no_fault", "NAMES=no_fault is no fault: choose of capacity_rounded_down, "),
        ("pipeline_box --variants dual", "--variants=dual is unknown: choose of 1f1b, "),
    ],
)
def test_what_makes_no_sense_is_refused(line: str, message: str, call: Call) -> None:
    with pytest.raises(UserError, match=message):
        call(line)


def test_of_one_program_the_fewest_seconds_of_compilation_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    kept = importlib.import_module("peer_shapes").with_fewest_seconds
    before = {"fingerprint": "a", "compile_cpu_s": 3.0, "temporary_gib": 2.0}
    slower, other = before | {"compile_cpu_s": 5.0, "temporary_gib": 1.0}, before | {"fingerprint": "b"}
    assert kept(slower, before) == slower | {"compile_cpu_s": 3.0}
    assert kept(before, slower) == before
    assert kept(slower, None) == slower
    assert kept(slower, other) == slower
