"""`plan --compile`, with saved programs in a compiler's place: factors, and the next plan where one does not fit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.draft import Draft, sections_of
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import UserError
from moe_jax.measure.targets import Target
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.memory import step_memory
from moe_jax.report import planned
from moe_jax.report.compiled import CompileError, Job, Outcome
from moe_jax.report.planned import compile_plans, target_of

PROGRAM = (Path(__file__).parent.parent / "measure" / "gpu_h100.hlo").read_text(encoding="utf-8")
CLUSTER = find_cluster("h100x8")
Compile = Callable[[Target, Job], tuple[str, Outcome]]


def draft() -> Draft:
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=4096)
    model = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=8, num_attention_heads=8, intermediate_size=4096, moe=moe
    )
    config = Config(
        model=model, mesh=MeshConfig(expert=8), data=DataConfig(seq_len=512), train=TrainConfig(batch_size=256)
    )
    return Draft(**sections_of(config), open=frozenset({"schedule.remat", "train.grad_accumulation"}))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[float]]:
    """Stands in for one that takes so many times the memory that is predicted; lists what it was given."""
    given: list[float] = []

    def install(factor: float) -> list[float]:
        def compile_job(target: Target, job: Job) -> tuple[str, Outcome]:
            predicted = step_memory(load_config(job.config), target.platform).total
            given.append(predicted)
            return PROGRAM, Outcome(
                num_devices=8,
                mesh={"data": 8},
                schedule=None,
                compile_s=1.0,
                argument_bytes=10**9,
                temporary_bytes=int(factor * predicted) - 10**9,
                result_bytes=0,
                peak_bytes=0,
                versions={"jax": "0.10.2"},
            )

        monkeypatch.setattr(planned, "compile_job", compile_job)
        monkeypatch.setattr(planned, "check_compiler", lambda target: None)
        return given

    return install


def test_a_plan_that_fits_is_compiled_once_and_corrected(compiler: Callable[[float], list[float]]) -> None:
    given = compiler(1.1)
    reported: list[str] = []
    checked = compile_plans(draft(), CLUSTER, reported.append)
    assert len(given) == 1
    assert checked.fits
    assert checked.memory_factor == pytest.approx(1.1)
    assert checked.compiled is not None
    assert checked.step_factor * checked.plans.best.estimate.step_s == checked.compiled.replay.step_s
    plan, output = reported
    assert plan.startswith("mesh ")
    assert "for h100:1x1x8 in 1 s, jax 0.10.2" in output
    assert "of 85.0 GB: × 1.10\n" in output
    assert "% hidden), compiled " in output
    assert "\ncorrected   step " in output


@pytest.mark.parametrize(
    ("unordered", "grad_reduce", "policy", "ending"),
    [
        (10**9, "end", "vanilla", "as compiled, × 0.25: is the plan"),
        (16 * 10**9, "end", "unified", "as compiled, × 4.00: the order of tasks is kept"),
        (None, "end", "unified", "unordered   no such step: the compiler was killed"),
        (10**9, "block", "unified", None),
    ],
    ids=["faster", "slower", "refused", "ordered by another setting"],
)
def test_an_order_of_tasks_that_is_slower_as_compiled_is_not_the_plan(
    unordered: int | None,
    grad_reduce: Literal["end", "block"],
    policy: str,
    ending: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated step overlaps its tasks; what a compiler makes of them may take longer than a plain step."""
    monkeypatch.setattr(planned, "check_compiler", lambda target: None)

    def compile_job(target: Target, job: Job) -> tuple[str, Outcome]:
        numbers = 4 * 10**9 if load_config(job.config).step_facts.orders_tasks else unordered
        if numbers is None:
            raise CompileError("the compiler was killed")
        line = f"%w = f32[{numbers}] copy(%p)"
        text = (
            f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n  %p = f32[1] parameter(0)\n  {line}\n}}\n"
        )
        sizes = dict.fromkeys(("argument_bytes", "temporary_bytes", "result_bytes", "peak_bytes"), 0)
        return text, Outcome(num_devices=8, mesh={"data": 8}, schedule=None, compile_s=1.0, versions={}, **sizes)

    monkeypatch.setattr(planned, "compile_job", compile_job)
    fixed = draft()
    schedule = dataclasses.replace(fixed.schedule, policy="unified", grad_reduce=grad_reduce)
    reported: list[str] = []
    found = compile_plans(
        dataclasses.replace(fixed, schedule=schedule, open=fixed.open | {"schedule.policy", "schedule.microbatches"}),
        CLUSTER,
        reported.append,
    )
    assert found.plans.config.schedule.policy == policy
    assert found.compiled is not None
    assert [text for text in reported if text.startswith("unordered")] == reported[2:3]
    if ending is None:
        assert len(reported) == 2
    else:
        assert reported[2].endswith(ending)


def test_a_plan_that_does_not_fit_makes_room_for_one_that_does(compiler: Callable[[float], list[float]]) -> None:
    device = dataclasses.replace(CLUSTER.device, memory_bytes=int(22e9))
    given = compiler(1.5)
    reported: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "PRESETS", {"h100": dataclasses.replace(planned.PRESETS["h100"], device=device)})
        second = compile_plans(draft(), dataclasses.replace(CLUSTER, device=device), reported.append)
    assert ", does not fit\n" in reported[1]
    assert second.fits
    assert ", does not fit\n" not in reported[3]
    assert 1.5 * given[1] <= 22e9 < 1.5 * given[0]


def test_a_refusal_for_want_of_memory_reports_how_much(
    compiler: Callable[[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(1.0)

    def refuse(target: Target, job: Job) -> tuple[str, Outcome]:
        raise CompileError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 108.50G of 94.75G hbm.")

    monkeypatch.setattr(planned, "compile_job", refuse)
    reported: list[str] = []
    with pytest.raises(UserError, match=r"^(--compile h100:1x1x8: none of 3 plans fits|nothing trains on h100x8)"):
        compile_plans(draft(), CLUSTER, reported.append)
    assert reported[1].startswith("refused     for h100:1x1x8: memory predicted ")
    assert " wanted 116.5 GB, of 85.0 GB: × " in reported[1]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("h100x4", "h100:1x1x4"),
        ("h200x64", "h200:1x8x8"),
        ("v5p-4", "v5p:2x2x1"),
        ("v5p-32", "v5p:2x4x4"),
        ("v5p-1024", "v5p:8x8x16"),
        ("v5p-6144", "v5p:16x16x24"),
        ("v5e-8", "v5e:2x4"),
        ("tpu7x-64", "tpu7x:2x4x4"),
        ("cpux8", "cpu:8"),
    ],
)
def test_clusters_have_targets(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "check_compiler", lambda target: None)
    assert target_of(find_cluster(name)).name == target


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("4xv5e-64", "--compile: 4xv5e-64 has several slices, and the compiler knows one: use one slice"),
        ("a100x8", "--compile a100:1x1x8: 'a100' is unknown: use one of v4, v5e,"),
    ],
)
def test_clusters_without_a_compiler_are_reported(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        target_of(find_cluster(name))
    assert str(error.value).startswith(message)


def test_a_missing_compiler_is_reported_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delattr(planned, "plan")
    with pytest.raises(UserError, match=r"^--compile h100:1x1x8 needs jax's CUDA plugin, which is not installed: pip"):
        compile_plans(draft(), CLUSTER, print)
