"""A run of two processes comes through seven faults: `profiling/chaos.py`, made small.

Without SIGTERM, which `tests/run/test_many_processes.py` sends, and a file cut short, which checksums find as they find
a bit.
"""

import importlib
from pathlib import Path

import pytest

from tests.results import result

EVERY = 10  # steps between checkpoints
ORDER = ("nan", "slow", "bit", "poke", "stop", "full", "kill")


def test_losses_are_those_of_an_undisturbed_run_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the faults make all processes start again. Without root no disk is full, and six are left of seven."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "profiling")
    module, faults = importlib.import_module("chaos"), importlib.import_module("chaos_faults")
    monkeypatch.setattr(faults, "_SLOW_S", 2.0)  # what is trained meanwhile is trained again by the undisturbed run
    monkeypatch.setattr(faults, "_POKE_S", 1.0)
    settings_of = module._settings
    monkeypatch.setattr(module, "_settings", lambda chaos: [*settings_of(chaos), "model.num_layers=1"])
    chaos = module.Chaos(
        ORDER, processes=2, while_starting=0, checkpoint_every=EVERY, steps_between=EVERY + 3, progress_timeout_s=8
    )
    found = module.disturbed_run(chaos)
    assert found["losses_equal_bit_for_bit"], "and each step is recorded once"
    assert [fault["kind"] for fault in found["faults"]] in (list(ORDER), [kind for kind in ORDER if kind != "full"])
    for fault in found["faults"]:
        kind = fault["kind"]
        assert fault.get("exit_code", 0) == 0
        assert fault.get("steps_lost", 0) <= module.MOST_LOST[kind] * EVERY
        assert kind != "poke" or (fault["ports"] >= 3 and fault["connections"] > 3 and not fault["restarted"])
        assert kind != "nan" or "going back to the checkpoint" in fault["told"]
    assert not found["broken"]
    assert found["checkpoints_put_aside"] >= 1


@pytest.mark.parametrize("name", ["chaos", "chaos_kill_stop"])
def test_a_hundred_faults_of_four_processes_were_come_through(name: str) -> None:
    """What docs/recovery.md says of the committed results."""
    found = result(name)
    assert found["processes"] == 4
    assert len(found["faults"]) == 100
    assert found["losses_equal_bit_for_bit"]
    assert not found["broken"]
    every = found["checkpoint_every"]
    for fault in found["faults"]:
        if fault["kind"] in ("kill", "stop") and "steps_lost" in fault:
            beyond = fault["steps_lost"] - every  # steps that ran while the newest checkpoint was being written
            assert beyond <= 0 or fault["step"] % every == beyond <= 2
