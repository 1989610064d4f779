"""A run of two processes comes through one fault of each kind: `profiling/chaos.py`, made small."""

import importlib
from pathlib import Path

import pytest

EVERY = 10  # steps between checkpoints
ORDER = ("nan", "slow", "bit", "term", "stop", "kill", "cut", "full")


def test_losses_are_those_of_an_undisturbed_run_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of the faults make all processes start again."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "profiling")
    module = importlib.import_module("chaos")
    chaos = module.Chaos(
        ORDER, processes=2, while_starting=0, checkpoint_every=EVERY, steps_between=EVERY + 3, progress_timeout_s=8
    )
    found = module.come_through(chaos)
    assert found["losses_equal_bit_for_bit"], "and each step is recorded once"
    faults = {fault["kind"]: fault for fault in found["faults"]}
    assert set(faults) >= set(ORDER) - {"full"}, "a disk needs root"
    assert faults["term"]["exit_code"] == 0
    assert faults["term"]["steps_lost"] == 0
    assert "going back to the checkpoint" in faults["nan"]["told"]
    for kind in ("kill", "stop", "nan"):  # one more save may be under way
        assert faults[kind]["steps_lost"] <= 2 * EVERY
    for kind in ("bit", "cut"):
        assert faults[kind]["steps_lost"] <= 3 * EVERY
    assert found["checkpoints_put_aside"] >= 1
