"""Each of the hostile inputs of `profiling/hostile_inputs.py` gets one line and exit code 2."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.cases import ROOT, Command

sys.path.append(str(ROOT / "profiling"))
hostile: Any = importlib.import_module("hostile_inputs")
INPUTS = list(hostile.hostile_inputs())
HERE = [each for each in INPUTS if not each.environ and not each.streams]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.make_inputs(folder)
    return folder


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    names = [each.name for each in INPUTS]
    assert len(names) == len(set(names)) >= 150


@pytest.mark.parametrize("each", HERE, ids=lambda each: each.name)
def test_it_gets_one_line(each: Any, inputs: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.syspath_prepend(inputs)
    before = sorted(path.relative_to(inputs) for path in inputs.rglob("*") if "__pycache__" not in path.parts)
    code, output = command(each.command)
    assert code == 2, output
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    assert output[:-1].isprintable()
    assert len(output) < 5000
    assert before == sorted(path.relative_to(inputs) for path in inputs.rglob("*") if "__pycache__" not in path.parts)


REAL = {
    "an unknown flag of XLA": "XLA_FLAGS has --xla_no_such_flag=1, which XLA does not know here: correct it, ",
    "a closed output": "standard output is closed: send it somewhere, e.g. > /dev/null",
    "a config that is a FIFO": "config file fifo.yaml cannot be read (it is not a regular file): name a YAML file",
    "devices that nobody makes": "JAX_PLATFORMS=abacus: jax finds no such devices here (",
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_process_prints_it(name: str, inputs: Path) -> None:
    refusals = importlib.import_module("refusals")
    (each,) = [each for each in INPUTS if each.name == name]
    ended = refusals.try_command(refusals.real_command(each), str(inputs), each.environ)
    assert ended.exit_code == 2, ended.errors
    assert ended.errors.startswith(f"error: {REAL[name]}")
    assert ended.errors.count("\n") == 1
