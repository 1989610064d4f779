"""Programs in profiling/ start, each with that folder first on the path: no file there hides a module of a library."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "profiling"


def test_all_programs_can_be_loaded() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    load = f"import importlib, sys; sys.path.insert(0, {str(FOLDER)!r}); import jax\n"
    load += f"for name in {names}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=FOLDER.parent)
    assert run.returncode == 0, run.stderr
