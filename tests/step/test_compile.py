"""What a run trains is what the report shows: one step, one way to compile it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jax.stages import Lowered

from moe_jax.config.step_kinds import STEP_FACTS, StepKindName
from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.measure.hlo import parse, without_frames
from moe_jax.measure.profile import estimated_profile
from moe_jax.measure.targets import find_target, target_of
from moe_jax.measure.temporaries import allocated_bytes
from moe_jax.schedule.xla_flags import compiler_options
from moe_jax.step import compile_cache as programs
from moe_jax.step.compile import StepProgram, step_program, switch_off_pgle, target_here
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import mesh_of

ROOT = Path(__file__).parents[2]
H200 = find_target("h200:1x1x8")
LIMIT = "xla_gpu_memory_limit_slop_factor"
SMALL = [
    *(
        "mesh.cpu_devices=2",
        "mesh.expert=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.num_layers=1",
    ),
    *("data.seq_len=8", "train.batch_size=8", "schedule.policy=unified", "schedule.microbatches=2"),
    # whose step has one argument more, and another capacity than the model from its first step on
    *("train.spike_factor=3", "train.skip_spikes=true", "model.moe.capacity_schedule=[[1,2.0]]"),
]


def command(*arguments: str, folder: Path, **environ: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # bytes that an untrained model writes
        cwd=folder,
        # with lines of Python in programs, as a user has them
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10", **environ},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_program_that_a_run_trains_is_the_one_that_the_report_shows(tmp_path: Path) -> None:
    """For the real commands: fingerprint, and every instruction of the scheduled program."""
    own = ["log.dir=run", "log.trace_step=2", "train.steps=2", "train.eval_every=0", "log.sample_tokens=0"]
    text = f"data.path={ROOT / 'configs' / 'text' / 'shakespeare.txt'}"
    config = str(ROOT / "configs" / "shakespeare_cpu.yaml")
    output = command("moe_jax.train", "--config", config, *SMALL, *own, text, folder=tmp_path, JAX_ENABLE_PGLE="true")
    assert output.count("JAX_ENABLE_PGLE=true has no effect, as steps are compiled before they run") == 1
    reported = command("moe_jax.report", "--compile", "cpu:2", "--config", "run", "--save-hlo", "hlo", folder=tmp_path)
    fingerprint = json.loads((tmp_path / "run" / "provenance.json").read_text())["step_program"]
    assert re.search(rf"^program +{fingerprint}, 'step_program' in provenance.json", reported, re.MULTILINE)
    written = [(tmp_path / file).read_text() for file in ("run/trace/0/step.hlo", "hlo/step.hlo")]
    assert all("stack_frame_id" in text for text in written)
    trained, shown = map(without_frames, written)
    assert "stack_frame_id" not in trained
    assert len(trained.splitlines()) > 1000
    assert trained == shown


def test_only_one_place_compiles_steps() -> None:
    others = [
        f"{file.relative_to(ROOT)}:{number}"
        for folder in ("moe_jax", "profiling")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\bstep\.(lower|trace\(.*\)\.lower)\(", line) and file.name != "compile.py"
    ]
    assert not others


@pytest.fixture
def toy() -> Lowered:
    """A program with a product and a sum over eight devices, under the names of tasks."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("F.expert.0.0"):
            y = x @ x.T
        return jax.lax.psum(y, "x") @ x

    return step.lower(jax.ShapeDtypeStruct((64, 8), np.float32))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of each."""
    found: list[dict[str, Any]] = []
    compile_it = Lowered.compile

    def spy(self: Lowered, compiler_options: Any = None, **others: Any) -> Any:
        found.append(compiler_options)
        return compile_it(self, compiler_options, **others)

    monkeypatch.setattr(Lowered, "compile", spy)
    return iter([found])


def test_a_step_for_gpus_is_compiled_again_with_estimated_times_of_its_instructions(
    toy: Lowered, compilations: Iterator[list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And under a supervisor loaded by the next process; for other rates it is another program."""
    (seen,) = compilations
    program = StepProgram(lowered=toy, options={"xla_a": True}, target=H200, num_devices=8)
    first = toy.compile()
    profile = estimated_profile(parse(first.as_text() or ""), H200, 8)
    assert re.search(r"cost_us: (?!0\.000)", profile)
    seen.clear()
    options = {"xla_backend_optimization_level": 0}
    program = StepProgram(lowered=toy, options=options, target=H200, num_devices=8)
    monkeypatch.setenv(PROGRAMS, str(tmp_path))
    programs.compiled(program)
    assert seen == [options, {**options, "fdo_profile": profile.encode()}]
    programs.compiled(program)
    assert len(seen) == 2, "kept"
    other = StepProgram(lowered=toy, options=options, target=find_target("h100:1x1x8"), num_devices=8)
    programs.compiled(other)
    assert len(seen) == 4
    once = StepProgram(lowered=toy, options=options, target=None, num_devices=8)
    programs.compiled(once)
    assert seen[4:] == [options]
    assert len({program.fingerprint, other.fingerprint, once.fingerprint}) == 3


@pytest.mark.parametrize(("first_s", "second_s", "kept"), [(2.0, 1.0, 1), (1.0, 1.0, 1), (1.0, 2.0, 0)])
def test_of_both_programs_for_gpus_the_faster_one_is_kept(
    first_s: float, second_s: float, kept: int, toy: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may make worse use of instruction times: of a small step it exposed more communication."""
    once = toy.compile()
    made: list[Any] = []

    def compile_again(self: Lowered, options: Any) -> Any:
        made.append(SimpleNamespace(as_text=once.as_text, memory_analysis=once.memory_analysis))
        return made[-1]

    seconds = iter([first_s, second_s])
    monkeypatch.setattr(Lowered, "compile", compile_again)
    monkeypatch.setattr("moe_jax.step.compile.replay", lambda *_: SimpleNamespace(step_s=next(seconds)))
    program = StepProgram(lowered=toy, options={}, target=H200, num_devices=8)
    assert program.compile() is made[kept]


def test_a_step_that_does_not_fit_without_a_limit_is_compiled_with_xlas_own(
    toy: Lowered, compilations: Iterator[list[dict[str, Any]]]
) -> None:
    (seen,) = compilations
    needed = allocated_bytes(toy.compile())
    own = {"xla_backend_optimization_level": 0}
    for memory_bytes, options, limits in [
        (needed * 100 // 95 + 1, own, [1000, 1000]),
        (needed, own, [1000, 1000, None, None]),
        (None, own, [None, None]),
        (needed, own | {LIMIT: 90}, [90, 90]),  # schedule.memory_percent
    ]:
        seen.clear()
        program = StepProgram(lowered=toy, options=options, target=H200, num_devices=8, memory_bytes=memory_bytes)
        program.compile()
        assert [each.get(LIMIT) for each in seen] == limits


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_step_has_no_source_lines_unless_the_environment_asks_for_them(
    asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 10)
    monkeypatch.setenv(name.upper(), "10")
    if not asked_for:
        monkeypatch.delenv(name.upper())
    trainer = make_trainer(small_config(1, 2), mesh_of(small_config(1, 2)))
    try:
        text = step_program(trainer, tokens_of(small_config(1, 2)), None).lowered.as_text(debug_info=True)
        assert getattr(jax.config, name) == 10
    finally:
        jax.config.update(name, before)
    assert ("transformer.py" in text) == asked_for


def test_rates_count_for_scheduled_steps_without_a_profile_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, scheduled = (
        make_trainer(small_config(2, 4, schedule=schedule), mesh_of(small_config(2, 4)))
        for schedule in ({}, {"policy": "unified", "microbatches": 1})
    )
    monkeypatch.delenv("XLA_FLAGS")
    tokens = tokens_of(small_config(2, 4))
    assert plain.options == scheduled.options == compiler_options("cpu", "cpu")
    once = step_program(plain, tokens, H200)
    assert (once.target, once.memory_bytes) == (None, H200.memory_bytes)
    of_tpus = step_program(scheduled, tokens, find_target("v5p:2x2x2"))
    assert (of_tpus.target, of_tpus.memory_bytes) == (None, None)
    program = step_program(scheduled, tokens, H200, {"xla_more": True})
    assert (program.target, program.options, program.num_devices) == (H200, {"xla_more": True}, 8)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_pgle_profile_file_or_directory_path=measured.pb")
    assert step_program(scheduled, tokens, H200).target is None


def gpus(kind: str, nodes: int, of_node: int, processes_of_node: int = 1, **attributes: int) -> list[Any]:
    return [
        SimpleNamespace(
            device_kind=kind,
            platform="gpu",
            process_index=(node * of_node + each) * processes_of_node // of_node,
            **attributes or {"slice_index": node},
        )
        for node in range(nodes)
        for each in range(of_node)
    ]


@pytest.mark.parametrize(
    ("devices", "hosts", "target"),
    [
        (gpus("NVIDIA H200", 1, 8), [7], "h200:1x1x8"),
        (gpus("NVIDIA H200", 1, 8, processes_of_node=8), [7] * 8, "h200:1x1x8"),
        (gpus("NVIDIA H100 80GB HBM3", 8, 8), list(range(8)), "h100:1x8x8"),
        (gpus("NVIDIA H100 80GB HBM3", 2, 8, processes_of_node=8), [7] * 16, "h100:1x2x8"),
        (gpus("NVIDIA H100 80GB HBM3", 2, 8, slice_index=0), [3, 4], "h100:1x2x8"),
    ],
    ids=["one process", "a process for each GPU", "nodes", "nodes, a process for each GPU", "nodes of one slice"],
)
def test_gpus_at_hand_are_the_target_that_the_report_names(devices: list[Any], hosts: list[int], target: str) -> None:
    assert target_of(devices, hosts) == find_target(target)


def test_trays_of_a_rack_are_joined_by_nvlink_and_racks_by_a_network() -> None:
    trays = target_of(gpus("NVIDIA GB200", 4, 4, slice_index=0), range(4))
    racks = target_of(gpus("NVIDIA GB200", 2, 72), range(2))
    assert trays is not None
    assert racks is not None
    assert (trays.layout, trays.network) == ("1x4x4", trays.link)
    assert (racks.layout, racks.link) == ("1x2x72", trays.link)
    assert racks.network.beta_s == pytest.approx(18 * racks.link.beta_s)


@pytest.mark.parametrize("kind", ["NVIDIA A10", "cpu", "TPU v5p"])
def test_of_other_devices_there_are_no_rates(kind: str) -> None:
    assert target_of(gpus(kind, 1, 8), [0]) is None


def trainer_on(kind: str, step_kind: StepKindName) -> Any:
    devices = np.array(gpus(kind, 1, 8)).reshape(2, 4)
    return SimpleNamespace(mesh=SimpleNamespace(devices=devices), kind=SimpleNamespace(facts=STEP_FACTS[step_kind]))


def test_a_run_reports_when_it_compiles_without_estimated_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target_here(trainer_on("NVIDIA H200", "scheduled")) == H200
    assert target_here(trainer_on("NVIDIA A10", "plain")) is None
    assert not capsys.readouterr().out
    assert target_here(trainer_on("NVIDIA A10", "scheduled")) is None
    assert capsys.readouterr().out == (
        "the rates of NVIDIA A10 are unknown: the step is compiled without estimated times of its instructions, which "
        "may expose more of its communication (docs/compiled.md)\n"
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_pgle_profile_file_or_directory_path=measured.pb")
    target_here(trainer_on("NVIDIA H200", "scheduled"))
    assert capsys.readouterr().out == (
        "XLA_FLAGS sets xla_gpu_pgle_profile_file_or_directory_path: the step is compiled by this profile, not by "
        "estimated times\n"
    )


def test_jaxs_own_profiles_are_switched_off_and_that_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    jax.config.update("jax_enable_pgle", True)
    switch_off_pgle()
    assert not jax.config.jax_enable_pgle
    assert capsys.readouterr().out == (
        "JAX_ENABLE_PGLE=true has no effect, as steps are compiled before they run: it is switched off "
        "(docs/compiled.md explains how to use a measured profile)\n"
    )
    switch_off_pgle()
    assert not capsys.readouterr().out
