"""The notebook's code runs from its first cell to its last, in a process of its own, as in a new kernel.

Without Jupyter: its cells are plain Python, and of IPython they need two classes that show what they are given.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = 12
WRITTEN = '"train.steps=200"'
LESS = f'"train.steps={STEPS}", "train.eval_batches=2", "model.num_layers=2", "log.sample_tokens=40"'
DISPLAY = """
import sys, types
display = types.ModuleType("IPython.display")
display.HTML = display.Image = lambda shown: shown
sys.modules["IPython.display"] = display
"""


@pytest.fixture(scope="module")
def notebook() -> dict:
    return json.loads((ROOT / "scripts/colab.ipynb").read_text())


def test_it_stores_no_results(notebook: dict) -> None:
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_it_runs(notebook: dict, tmp_path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(WRITTEN in cell for cell in cells) == 1
    program = "\n".join([DISPLAY, *cells]).replace(WRITTEN, LESS)
    program += "\nassert 'HTML' in globals() and picture.getvalue().startswith(b'\\x89PNG')"
    (tmp_path / "notebook.py").write_text(program)
    environ = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "notebook.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stderr + done.stdout
    run = tmp_path / "runs/notebook"
    assert (run / "report.html").exists()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("expert_load" in record for record in records)
    unified, vanilla = (float(line.split()[1]) for line in sorted(done.stdout.splitlines()) if " ms, of which" in line)
    assert unified < vanilla
