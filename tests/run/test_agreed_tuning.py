"""A round of tuning on several processes: process 0 decides, and all change their step together."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_jax.config import Config, ScheduleConfig, TuneConfig
from moe_jax.run import agreed_compile, tuning
from moe_jax.run.agreed_compile import AgreedCompile, State
from moe_jax.run.tuning import Tuning
from moe_jax.run.tuning_space import Choices

CONFIG = Config(
    schedule=ScheduleConfig(policy="unified", microbatches=2, grad_reduce="bucketed"),
    tune=TuneConfig(over=("bucket_cap_mb",), samples=3, iterations=2),
)
ROUND = tuning.WARMUP_STEPS + 2
PROGRAMS: Any = ["first", "second", "third"]


def tuning_of(folder: Path) -> Tuning:
    """Tuning whose programs are all compiled, and the times of whose steps do not matter."""
    choices = Choices(CONFIG, ((1.0,), (2.0,), (4.0,)), first=0, best_s=None, file=folder / "tuned.json", key={})
    run: Any = SimpleNamespace(choices=choices, config=CONFIG, folder=folder, first_step=0)
    meter: Any = SimpleNamespace(step_s=0.5, paused=nullcontext)
    log: Any = SimpleNamespace(info=lambda text: None, write=lambda record: None, warn=lambda text: None)
    made = Tuning(run, PROGRAMS[0], meter, log)
    made._programs = dict(enumerate(PROGRAMS))
    return made


def programs_after(process: Tuning, first: Any, steps: range) -> list[Any]:
    """The program in use after each of some steps; `first` is in use before them."""
    used = [first]
    for step in steps:
        used.append(process.after_step(step) or used[-1])
    return used[1:]


@pytest.mark.parametrize("has_timed", [True, False])
def test_other_processes_take_the_choice_of_process_0(
    has_timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have timed no step, and whatever they have measured themselves."""
    own, answers = [], iter([(2, 1), (1, 1), (1, 0)])  # the choice of process 0, and whether it searches further

    def allgather(number: int) -> list[int]:
        own.append(number)
        wanted, searching = next(answers)
        return [2 * wanted + searching, number]

    def not_asked(*_: object) -> int:
        raise AssertionError("process 1 decides")

    monkeypatch.setattr(tuning, "is_main_process", lambda: False)
    monkeypatch.setattr(tuning, "allgather", allgather)
    monkeypatch.setattr(tuning._Decider, "measured", not_asked)
    process_1 = tuning_of(tmp_path)
    if not has_timed:
        process_1._meter.step_s = None
    assert programs_after(process_1, "first", range(1, 3 * ROUND + 1)) == [
        *["first"] * (ROUND - 1),
        *["third"] * ROUND,
        *["second"] * (ROUND + 1),
    ], "at the end of each round, which is the same step on all processes"
    assert process_1.search_state is None, "the search is over where process 0 says so"
    assert len(own) == 3


def test_process_0_sends_what_it_has_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported, measured = [], []

    def decide(self: object, step: int, seconds: float) -> int:
        measured.append((step, seconds))
        return 2

    monkeypatch.setattr(tuning, "is_main_process", lambda: True)
    monkeypatch.setattr(tuning, "allgather", lambda number: (reported.append(number), [number, 0])[1])
    monkeypatch.setattr(tuning._Decider, "measured", decide)
    process_0 = tuning_of(tmp_path)
    *_, program = programs_after(process_0, "first", range(1, ROUND + 1))
    assert measured == [(ROUND, 0.5)]
    assert reported == [2 * 2 + 1]
    assert program == "third"


def test_a_program_that_one_process_cannot_compile_is_used_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no process changes its step before all have compiled."""
    of_process_0 = iter([State.COMPILING, State.FAILED, 2 * 1 + 1])  # and then it wants the second program
    monkeypatch.setattr(tuning, "is_main_process", lambda: False)
    for module in (tuning, agreed_compile):
        monkeypatch.setattr(module, "allgather", lambda own: [next(of_process_0), own])
    process_1 = tuning_of(tmp_path)
    compiled = AgreedCompile(lambda: PROGRAMS[2])
    assert compiled.result() == "third"
    process_1._compiling, process_1._wanted = compiled, 2
    *_, program = programs_after(process_1, "first", range(1, ROUND + 1))
    assert (program, process_1._compiling) == ("first", compiled)
    *_, program = programs_after(process_1, program, range(ROUND + 1, 2 * ROUND + 1))
    assert (program, process_1._compiling) == ("second", None)
