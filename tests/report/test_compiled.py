"""`--compile`: from a config to numbers, and every wrong word answered with one line."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from moe_jax.cli import report
from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError, UserError, run_command
from moe_jax.measure.targets import Target, check_compiler, find_target
from moe_jax.measure.tasks import action_of
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.report.compiled import Job, Outcome, analyse, compile_job, file_name, variants_of
from moe_jax.report.compiled_text import assumptions, columns, compare, describe
from moe_jax.run.profiler import Tracing
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.xla_flags import FLAGS, compiler_options, memory_option
from moe_jax.step.trainer import make_trainer
from tests.schedule.steps import nominal
from tests.small import tokens_of

MEASURE = Path(__file__).parent.parent / "measure"
SMALL = [
    *(
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.num_layers=1",
        "model.vocab_size=32",
        "data.seq_len=8",
    ),
    *("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.intermediate_size=8", "train.batch_size=16"),
]

PLAIN = [
    *("schedule.policy=vanilla", "schedule.microbatches=1", "schedule.weight_grad=inline"),
    *("schedule.grad_reduce=end", "schedule.bucket_cap_mb=null"),
]


def outcome(schedule: str | None = None) -> Outcome:
    return Outcome(
        num_devices=8,
        mesh={"data": 2, "expert": 4},
        schedule=schedule,
        compile_s=12.3,
        argument_bytes=3_100_000_000,
        temporary_bytes=4_600_000_000,
        result_bytes=1_000,
        peak_bytes=7_500_000_000,
        versions={"jax": "0.10.2"},
    )


def toy_schedule() -> str:
    shape = make_shape("unified", ["moe"], 2)
    return str(make_schedule("unified", shape, nominal(shape).of(shape)))


@pytest.mark.parametrize(("file", "target"), [("tpu_v5p.hlo", "v5p:2x2x2"), ("gpu_h100.hlo", "h100:1x1x8")])
def test_a_saved_program_is_reported_with_and_without_its_schedule(file: str, target: str) -> None:
    text = (MEASURE / file).read_text(encoding="utf-8")
    hardware = find_target(target)
    plain = analyse("vanilla", text, outcome(), hardware)
    assert plain.predicted is None
    planned = analyse("unified", text, outcome(toy_schedule()), hardware)
    output = describe(planned)
    assert "3.10 GB arguments, 4.60 GB temporaries" in output
    assert "F.dispatch.0.0  all-to-all" in output
    assert "merged" in output
    assert planned.predicted is not None
    assert planned.predicted.makespan_s <= planned.replay.step_s
    table = compare([plain, planned]).splitlines()
    assert [line.split()[0] for line in table] == ["variant", "vanilla", "unified"]
    assert [line.split()[2] for line in table[1:]] == ["1.000", "1.000"]
    assert ("GHz" in assumptions(hardware)) == (hardware.platform == "tpu")


def test_predicted_tasks_take_the_time_of_their_instructions() -> None:
    text = (MEASURE / "tpu_v5p.hlo").read_text(encoding="utf-8")
    planned = analyse("unified", text, outcome(toy_schedule()), find_target("v5p:2x2x2"))
    assert planned.predicted
    dispatch = Action.parse("F.dispatch.0.1")
    task = next(task for task in planned.predicted.tasks if task.action == dispatch)
    assert task.end_s - task.start_s == pytest.approx(planned.replay.collectives[1].seconds)


def test_variants_are_policies_with_settings_of_their_own() -> None:
    variants = variants_of("vanilla, unified+exchange.algorithm=ring", ["schedule.microbatches=4"])
    assert variants == {
        "vanilla": [
            "schedule.microbatches=4",
            "schedule.policy=vanilla",
            "schedule.microbatches=1",
            "schedule.backward_microbatches=null",
            "schedule.expert_chunks=1",
            "schedule.weight_grad=inline",
            "schedule.grad_reduce=end",
            "schedule.bucket_cap_mb=null",
        ],
        "unified+exchange.algorithm=ring": [
            "schedule.microbatches=4",
            "schedule.policy=unified",
            "exchange.algorithm=ring",
        ],
    }
    assert variants_of(None, ["train.seed=1"]) == {"step": ["train.seed=1"]}
    assert file_name("unified+log.dir=a/b c") == "unified+log.dir=a_b_c"


def test_columns_line_up() -> None:
    assert columns([("a", "1", "10"), ("long", "200", "3")]) == "a       1  10\nlong  200   3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5q:2x2", "--compile v5q:2x2: 'v5q' is unknown: use one of v4, v5e, v5p, v6e, tpu7x, h100, h200, cpu, as in"),
        ("v5p", "--compile v5p: '' is no layout of v5p: write v5p:2x2x2"),
        ("h100:8", "--compile h100:8: '8' is no layout of h100: write h100:1x8x8 (slices × hosts × GPUs per host)"),
        ("v5p:2x2x0", "--compile v5p:2x2x0 has no devices: use 1 or more along each axis, as in v5p:2x2x1"),
        ("h100:0x1x08", "--compile h100:0x1x08 has no devices: use 1 or more along each axis, as in h100:1x1x8"),
        (f"v5e:1x{'9' * 5000}", f"--compile v5e:1x{'9' * 5000} has too many devices: use up to 1,048,576"),
        ("cpu:2x2", "--compile cpu:2x2: '2x2' is no layout of cpu: write cpu:8"),
    ],
)
def test_unknown_hardware_is_answered_with_a_cure(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        find_target(name)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:2x2x2", "--compile v5p:2x2x2 needs libtpu, which is not installed: pip install -e '.[tpu]'"),
        (
            "h200:1x1x8",
            "--compile h200:1x1x8 needs jax's CUDA plugin, which is not installed: pip install -e '.[cuda]'",
        ),
    ],
)
def test_a_missing_compiler_is_answered_with_a_cure(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError) as error:
        check_compiler(find_target(name))
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_clocks_of_tpus_follow_from_their_peak(name: str) -> None:
    target: Target = find_target(name)
    assert target.clock_hz
    assert 0.9e9 < target.clock_hz < 2.3e9


def test_flags_are_distinguished_by_platform_and_have_reasons() -> None:
    assert all(name.startswith("xla_gpu_") for name in compiler_options("gpu", "NVIDIA H200"))
    assert compiler_options("tpu", "TPU v5")["xla_tpu_enable_async_all_to_all"] == "true"
    assert compiler_options("cpu", "cpu") == {}
    assert all(flag.reason for flags in FLAGS.values() for flag in flags)


def test_all_reduces_of_tpus_overlap_on_the_sparse_core_or_without_one_in_fusions() -> None:
    sparse, fused = "xla_tpu_enable_sparse_core_collective_offload_all_reduce", "xla_enable_async_all_reduce"
    for kind, has_sparse_core in (("TPU v5", True), ("TPU v6 lite", True), ("TPU v5 lite", False)):
        options = compiler_options("tpu", kind)
        assert (sparse in options, fused in options) == (has_sparse_core, not has_sparse_core)


def test_the_installed_xla_knows_every_flag_for_gpus() -> None:
    """Otherwise no scheduled step would compile there. Flags of GPUs are known to XLA on every platform."""
    step = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    step.compile(compiler_options=compiler_options("gpu", "NVIDIA H200") | memory_option(40, "gpu"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        step.compile(compiler_options={"xla_gpu_no_flag": True})


def test_memory_of_the_scheduler_is_an_option_of_gpus_and_tpus() -> None:
    assert memory_option(None, "tpu") == memory_option(None, "cpu") == {}
    assert memory_option(18, "tpu") == {"xla_tpu_scheduler_percent_shared_memory_limit": 18}
    config = load_config("configs/shakespeare_cpu.yaml", ["schedule.memory_percent=18"])
    message = "schedule.memory_percent=18 is for GPUs and TPUs, and these devices are cpu: use schedule.memory_percent="
    with pytest.raises(ConfigError, match=message):
        make_trainer(config, make_mesh(config.mesh))


def test_versions_have_the_flags_that_they_know() -> None:
    """Ragged exchanges of GPUs go through NCCL with each: newer versions want that to be allowed as well."""
    switch, permission = (
        "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel",
        "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback",
    )
    older, newer = (
        compiler_options("gpu", "NVIDIA H200", (0, 11, 0)),
        compiler_options("gpu", "NVIDIA H200", (0, 12, 0, 1)),
    )
    assert (older[switch], permission in older) == (False, False)
    assert (newer[switch], newer[permission]) == (False, True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def trace_a_step(config: Config, run: Path) -> None:
    trainer = make_trainer(config, make_mesh(config.mesh))
    batch = jax.device_put(tokens_of(config), NamedSharding(trainer.mesh, BATCH_SPEC))
    state = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype, device=each.sharding), trainer.state_shapes)
    program = trainer.step.lower(state, batch).compile()
    meter: Any = SimpleNamespace(paused=nullcontext)
    log: Any = SimpleNamespace()
    with Tracing(range(1, 2), run, log) as tracing:
        tracing.begin(1, meter)
        jax.block_until_ready(program(state, batch))
        tracing.end(1, program, meter)


def test_a_pipelined_program_runs_its_passes_as_often_as_the_table_lists() -> None:
    """Each of four microbatches sends and combines once on a stage, whatever the number of ticks."""
    stages = ["mesh.pipeline=2", "mesh.expert=4", "model.num_layers=2", "train.grad_accumulation=4"]
    target = find_target("cpu:8")
    job = Job(
        target=target.name, config="configs/bench/fine_grained.yaml", overrides=[*SMALL, *stages, *PLAIN], options={}
    )
    found = analyse("step", *compile_job(target, job), target)
    names = [action for task in found.replay.collectives if (action := action_of(task.op_name))]
    for exchange in ("F.dispatch.0.0", "F.combine.0.0", "B.combine.0.0", "B.dispatch.0.0"):
        assert names.count(Action.parse(exchange)) == 4
    assert found.replay.idle_s > 0
    assert "idle, waiting for other stages" in describe(found)


def test_command_compiles_compares_and_leaves_files(tmp_path: Path) -> None:
    """The measured lanes of a step that was traced here have the same tasks as the compiled ones."""
    config = tmp_path / "small.yaml"
    config.write_text("mesh: {data: 1, expert: 8}\nschedule: {policy: unified, microbatches: 2}\n")
    trace_a_step(load_config(config, SMALL), tmp_path / "run")
    command = [sys.executable, "-m", "moe_jax.report"]
    command += ["--compile", "cpu:8", "--config", str(config), *SMALL, "--trace", str(tmp_path / "run" / "trace" / "0")]
    command += ["--policies", "vanilla,unified", "--save-hlo", str(tmp_path / "hlo"), "--out", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert names(tmp_path / "hlo") == ["unified.hlo", "unified.schedule", "vanilla.hlo"]
    assert names(tmp_path / "out") == ["report.txt", "timeline.png", "trace.json"]
    output = (tmp_path / "out" / "report.txt").read_text()
    text, _, origin = output.partition("\n\ndate: ")
    assert text in run.stdout
    assert "\ncommand: python -m moe_jax.report --compile cpu:8" in origin
    assert "not issued         none" in output
    assert re.search(r"^F\.dispatch\.0\.1 +all-to-all ", output, re.MULTILINE)
    assert "── unified, measured: device 0 of " in output
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(processes) == ["vanilla, compiled", "unified, predicted", "unified, compiled", "unified, measured"]
    tasks = {
        name: {event["name"] for event in events if event["pid"] == pid and event["ph"] == "X" and "." in event["name"]}
        for name, pid in processes.items()
    }
    assert tasks["unified, measured"] == tasks["unified, compiled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "cpu:8"], "--compile needs a model to compile: name it with --config FILE"),
        ([], "nothing to report on: name the folder of a run, or --compile TARGET --config FILE"),
        (["runs", "train.seed=1"], "'train.seed=1' is a setting for --compile: name one folder only"),
        (
            [
                "--compile",
                "cpu:8",
                "--config",
                "small.yaml",
                "mesh.expert=3",
                "model.moe.num_experts=9",
                "--out",
                "out",
            ],
            "mesh: data=1 × expert=3 = 3, but there are 8 devices: use mesh.expert=2 with mesh.data=-1",
        ),
        (
            ["--compile", "cpu:8", "--config", "small.yaml", "--policies", "vanila", "--out", "out"],
            "schedule.policy=vanila must be vanilla or expert_pipeline or unified or package.module:name: "
            "did you mean vanilla?",
        ),
    ],
)
def test_command_answers_wrong_input_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    Path("small.yaml").write_text("mesh: {data: 1, expert: 8}\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        run_command(report.main)
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {message}"
    assert not Path("out").exists()
