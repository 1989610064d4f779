"""A run that measures its step's instructions: what it runs at each step, on every process, and what it keeps."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from moe_jax.config import Config, ScheduleConfig
from moe_jax.errors import ConfigError
from moe_jax.measure.trace import TracedOperation, TraceError
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run import agreed_compile, kept_profile, measured_profile, setup
from moe_jax.run.agreed_compile import AgreedCompile
from moe_jax.run.kept_profile import FILE, KeptProfile, check_profile_steps, step_key
from moe_jax.run.loop import train
from moe_jax.run.measured_profile import ProfileGuided
from moe_jax.step.compile import StepProgram
from tests.run.test_resume import config_in, losses_of

HLO = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[2]) -> f32[2] {
  ROOT %y = f32[2] negate(%x), metadata={op_name="jit(step)/F.expert.0.0/neg"}
}
"""
PROFILE = 'costs { name: "y" cost_us: 3.000 }\n'
STEPS = 2  # to trace


class Source:
    """What a step is compiled from; the name of a program says how."""

    target, num_devices, fingerprint = None, 2, "4567"

    def __init__(self, name: str = "estimated", error: str = "", num_bytes: int = 10 * 10**9):
        self.name, self.error, self.num_bytes = name, error, num_bytes

    @property
    def for_tracing(self) -> "Source":
        return Source("traced", self.error, self.num_bytes)

    def with_measured(self, profile: str) -> "Source":
        assert profile == PROFILE
        return Source("measured")


def named(name: str, num_bytes: int = 10 * 10**9) -> Any:
    memory = SimpleNamespace(
        argument_size_in_bytes=num_bytes, temp_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0
    )
    return SimpleNamespace(name=name, as_text=lambda: HLO, memory_analysis=lambda: memory)


def compiled(source: Source) -> Any:
    if source.error:
        raise RuntimeError(source.error)
    return named(source.name, source.num_bytes)


def wait_for_compilers(patch: pytest.MonkeyPatch) -> None:
    """A program is compiled when processes ask each other for the first time."""
    state = AgreedCompile.agreed_state
    patch.setattr(AgreedCompile, "agreed_state", lambda self: (self._program.exception(), state(self))[1])


class Scene:
    """The processes of a run, one after another; those after process 0 are sent what it has sent."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder, self._patch = folder, patch
        self.sent: list[Any] = []
        self.said: list[str] = []
        self.traced: list[int] = []  # steps before which tracing starts, and below 0 before which it stops
        self.seconds: dict[str, float | None] = {"estimated": 0.5, "measured": 0.4, "traced": 0.9}
        self.trace: Callable[[], list[TracedOperation]] = lambda: [
            TracedOperation("y", "F.expert.0.0", False, "", 1.0, 1.000003, "0")
        ]
        wait_for_compilers(patch)
        patch.setattr(measured_profile, "compiled", compiled)
        patch.setattr(measured_profile, "read_trace", lambda folder, text: self.trace())
        patch.setattr(measured_profile, "start_trace", lambda folder: self.traced.append(self._step))
        patch.setattr(jax.profiler, "stop_trace", self.stop)

    def stop(self) -> None:
        assert self.traced[-1] > 0, "not started"
        self.traced.append(-self._step)

    def run(self, process: int, source: Source | None, last: int, busy: range = range(0)) -> list[str]:
        """The names of the programs of all steps."""
        received, self.sent, paused = list(self.sent), [], [False]

        def from_process(sender: int, value: Any) -> Any:
            assert paused[0], "a step runs"
            self.sent.append(value if process == 0 else received[len(self.sent)])
            return self.sent[-1]

        def allgather(number: int) -> list[int]:
            assert paused[0], "a step runs"
            self.sent.append(int(number))
            return [number, number if process == 0 else received[len(self.sent) - 1]]

        @contextmanager
        def pause() -> Iterator[None]:
            paused[0] = True
            yield
            paused[0] = False

        for module in (measured_profile, kept_profile, agreed_compile):
            self._patch.setattr(module, "is_main_process", lambda: process == 0)
        self._patch.setattr(measured_profile, "from_process", from_process)
        self._patch.setattr(agreed_compile, "allgather", allgather)
        schedule = ScheduleConfig(policy="unified", microbatches=2, profile_steps=STEPS)
        trainer = SimpleNamespace(kind=SimpleNamespace(facts=SimpleNamespace(orders_tasks=True)))
        run: Any = SimpleNamespace(config=Config(schedule=schedule), folder=self.folder, first_step=0, trainer=trainer)
        meter: Any = SimpleNamespace(step_s=None, paused=pause)
        log: Any = SimpleNamespace(info=self.said.append, warn=self.said.append)
        names, name = [], "estimated"
        any_source: Any = source
        first = named("estimated")
        with ProfileGuided(run, any_source, first, meter, log, busy) as guided:
            for step in range(1, last + 1):
                self._step = step
                if (program := guided.program_of(step)) is not None:
                    name = program.name
                assert guided.is_tracing == (name == "traced" and bool(self.traced) and self.traced[-1] > 0) or process
                names.append(name)
                meter.step_s = self.seconds[names[-2]] if step > 1 else None  # of the step before
            guided.finish()
        return names


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def lengths(names: list[str]) -> list[tuple[str, int]]:
    """Runs of equal names."""
    found: list[tuple[str, int]] = []
    for name in names:
        found = [*found[:-1], (name, found[-1][1] + 1)] if found and found[-1][0] == name else [*found, (name, 1)]
    return found


ROUND = [("measured", 14), ("estimated", 14)]
COMPILING = ("estimated", 10)


@pytest.mark.parametrize("faster", ["estimated", "measured"])
def test_the_faster_of_two_programs_is_chosen_by_all_processes(scene: Scene, faster: str) -> None:
    scene.seconds[faster] = 0.3
    names = scene.run(0, Source(), last=90)
    sent = list(scene.sent)
    assert lengths(names)[:5] == [COMPILING, ("traced", 3 + STEPS), COMPILING, *ROUND]
    assert names[-1] == faster
    assert scene.traced == [14, -16], "after the first steps of a new program"
    assert scene.said[-1].endswith(f"continuing with {faster}")
    kept = json.loads((scene.folder / FILE).read_text())
    assert kept["profile"] == (PROFILE if faster == "measured" else None)
    scene.seconds = dict.fromkeys(scene.seconds, 1.0)  # whatever process 1 measures
    (scene.folder / FILE).unlink()
    assert scene.run(1, Source(), last=90) == names
    assert scene.sent == sent, "both communicate in the same order"
    assert not (scene.folder / FILE).exists(), "process 0 writes"


def test_nothing_is_measured_unasked(scene: Scene) -> None:
    assert set(scene.run(0, None, last=100)) == {"estimated"}
    assert not scene.said
    assert not scene.sent


@pytest.mark.parametrize("begins", [12, 15, 16])
def test_steps_that_are_traced_otherwise_keep_their_program(scene: Scene, begins: int) -> None:
    """A trace in the way delays the other one, and is of the program that the run usually has."""
    names = scene.run(0, Source(), last=200, busy=range(begins, 30))
    assert set(names[:29]) == {"estimated"}
    assert scene.traced == [33, -35]
    assert names[-1] == "measured"


@pytest.mark.parametrize("process", [0, 1])
def test_a_step_that_cannot_be_compiled_or_traced_trains_as_before(scene: Scene, process: int) -> None:
    def nothing() -> list[TracedOperation]:
        return []

    def unreadable() -> list[TracedOperation]:
        raise TraceError("the trace is cut")

    def odd() -> list[TracedOperation]:
        raise KeyError("ts")

    for source, trace, problem in (
        (Source(error="out of memory\nand more"), nothing, "a step to trace cannot be compiled, out of memory"),
        (Source(num_bytes=11 * 10**9), nothing, "a step to trace needs 11.0 GB per device of 10.0 GB"),
        (Source(), nothing, "jax's profiler saw none of the step's instructions"),
        (Source(), unreadable, "the trace of its instructions failed, the trace is cut"),
        (Source(), odd, "the trace of its instructions failed, 'ts'"),
    ):
        scene.trace, scene.sent = trace, []
        names = scene.run(0, source, last=40)
        if process:
            assert scene.run(1, source, last=40) == names
        warned = next(text for text in scene.said if problem in text)
        assert warned.endswith("continuing with estimated times of its instructions")
        assert names[-1] == "estimated"
        assert "measured" not in names
        assert not (scene.folder / FILE).exists()
        assert sum(scene.traced) <= 0, "the profiler is off"


@pytest.mark.parametrize("process", [0, 1])
def test_a_profiler_that_does_not_start_or_stop_ends_no_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the disk is full")

    for module, name, problem in (
        (measured_profile, "start_trace", "its instructions cannot be traced, the disk is full"),
        (jax.profiler, "stop_trace", "the trace of its instructions failed, the disk is full"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            names = scene.run(0, Source(), last=40)
            if process:
                assert scene.run(1, Source(), last=40) == names
        assert problem in scene.said[-1]
        assert names[-1] == "estimated"


def test_without_times_nothing_is_chosen(scene: Scene) -> None:
    scene.seconds["measured"] = None
    assert scene.run(0, Source(), last=90)[-1] == "estimated"
    assert "too few of its steps could be timed" in scene.said[-1]
    assert not (scene.folder / FILE).exists()


def test_a_run_that_ends_early_says_so_and_stops_the_profiler(scene: Scene) -> None:
    scene.run(0, Source(), last=14)
    assert scene.traced == [14, -14]
    assert scene.said[-1].startswith("schedule.profile_steps: the run ends before its step is measured")
    assert not (scene.folder / FILE).exists()


def test_a_step_that_ends_its_run_twice_is_measured_no_more(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that needs more memory than its compiler said would end every start, before its next checkpoint."""
    monkeypatch.setattr(kept_profile, "is_main_process", lambda: True)
    key = step_key(Source())

    def run_that_ends(by: type[BaseException]) -> None:
        def fail(self: Any, *_: Any) -> Any:
            raise by
            yield

        with monkeypatch.context() as patch:
            patch.setattr(ProfileGuided, "_tracing", fail)
            with pytest.raises(by):
                scene.run(0, Source(), last=90)

    for starts in (1, 2):
        run_that_ends(KeyboardInterrupt)
        run_that_ends(MemoryError)
        found = kept_profile.kept_profile(scene.folder, key)
        assert f"while they measured the step: {starts}; the step is" in capsys.readouterr().out
        assert (found is None) == (starts == 1)
    assert found == KeptProfile(key, None, 2)
    assert kept_profile.kept_profile(scene.folder, "of another step") is None
    assert scene.run(0, Source(), last=90)[-1] == "measured", "the user has removed the file, say"
    assert json.loads((scene.folder / FILE).read_text())["starts_ended"] == 0


def test_a_file_that_is_damaged_meanwhile_ends_no_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(self: ProfileGuided, *_: Any) -> Any:
        (scene.folder / FILE).write_text("{")
        yield self._first

    monkeypatch.setattr(ProfileGuided, "_tracing", damage)
    assert scene.run(0, Source(), last=90)[-1] == "estimated"


@pytest.fixture
def devices_with_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices, whose compiler ignores a profile."""
    monkeypatch.setattr(kept_profile, "_PLATFORMS", ("cpu",))


@pytest.mark.usefixtures("devices_with_profiles", "exact")
def test_a_run_measures_once_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "make_mesh", lambda settings: make_mesh(settings, jax.devices()[:2]))
    monkeypatch.setattr(ProfileGuided, "_choose", lambda self, program, profile, *seconds: keep(self, program, profile))
    used: list[str | None] = []
    compile_it = StepProgram.compile

    def keep(self: ProfileGuided, program: StepProgram, profile: str) -> bool:
        KeptProfile(step_key(program), profile).write(self._run.folder, {})
        return True

    def spy(self: StepProgram, *given: Any) -> Any:
        used.append(self.profile)
        return compile_it(self, *given)

    monkeypatch.setattr(StepProgram, "compile", spy)
    settings = [
        "mesh.data=1",
        "mesh.expert=2",
        "model.num_layers=1",
        "model.moe.moe_layer_freq=1",
        "train.eval_every=0",
    ]
    settings += ["schedule.policy=unified", "schedule.microbatches=2", "checkpoint.every=0", "log.every=1"]
    plain, measured = tmp_path / "plain", tmp_path / "measured"
    for folder in (plain, measured):
        folder.mkdir()
    monkeypatch.setattr(measured_profile, "_ROUNDS", 0)
    monkeypatch.setattr(measured_profile, "_ROUND", 2)
    profiled = [*settings, f"schedule.profile_steps={STEPS}"]
    wait_for_compilers(monkeypatch)
    train(config_in(measured, *profiled, "train.steps=12"))
    output = capsys.readouterr().out
    assert "step 8: compiling the step by measured times while training continues\n" in output
    assert used[:2] == [None, None]
    assert used[2].count("cost_us") > 100
    assert 'name: "' in used[2]
    train(config_in(measured, *profiled, "train.steps=14"))
    output = capsys.readouterr().out
    assert f"the step is compiled by the measured times in {measured / FILE}\n" in output
    assert used[3:] == [used[2]]
    train(config_in(plain, *settings, "train.steps=14"))
    assert losses_of(measured) == losses_of(plain), "bit for bit"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is invalid"),
        ('{"step_key": 3}', "it names no program"),
        ('{"step_key": "0123", "starts_ended": "2"}', "it counts no starts"),
        ('{"step_key": "0123", "profile": "costs { evil }"}', "its profile has other lines than times"),
        (json.dumps({"step_key": "4567", "profile": PROFILE}), "is of another program: the step is measured again"),
        (json.dumps({"step_key": "0123", "profile": None}), "the step was slower by measured times"),
        (json.dumps({"step_key": "0123", "profile": PROFILE}), "the step is compiled by the measured times in"),
    ],
)
def test_what_a_run_finds_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / FILE).write_text(content)
    found = kept_profile.kept_profile(tmp_path, "0123")
    assert message in capsys.readouterr().out
    assert (found is not None) == ('"0123"' in content and "evil" not in content and "ended" not in content)


def test_devices_without_profiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(schedule=ScheduleConfig(profile_steps=3))
    with pytest.raises(ConfigError, match=r"schedule\.profile_steps=3 is for GPUs, and these devices are cpu: use"):
        check_profile_steps(config, make_mesh(config.mesh))
    monkeypatch.setattr(kept_profile, "_PLATFORMS", ("cpu",))
    check_profile_steps(config, make_mesh(config.mesh))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_pgle_profile_file_or_directory_path=times.pbtxt")
    with pytest.raises(
        ConfigError, match=r"schedule\.profile_steps=3 measures a profile, and XLA_FLAGS names the file"
    ):
        check_profile_steps(config, make_mesh(config.mesh))
