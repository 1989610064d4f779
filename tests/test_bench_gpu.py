"""The benchmark of GPUs runs from end to end without one, and what fails in a part stays there."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from moe_jax.measure.hlo import parse
from moe_jax.measure.targets import find_target
from moe_jax.models.grouped_matmul import blocks_dgrad
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.plan.memory import step_memory
from moe_jax.plan.resources import train_flops_per_token

FOLDER = Path(__file__).parents[1] / "profiling"
HIDDEN = ("grain", "pydantic", "tokamax", "matplotlib")  # that a machine with a GPU may not have


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_all_of_it_runs_at_toy_size_on_a_bare_machine(tmp_path: Path) -> None:
    for name in HIDDEN:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is hidden')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    only = "coarse,coarse-transformers,fine"
    run = subprocess.run(
        [sys.executable, str(FOLDER / "bench_gpu.py"), "--toy", "--only", only, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=FOLDER.parent,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out" / "bench_gpu.quick.json").read_text())
    assert found["provenance"]["jax"]
    rates = found["parts"]["rates"]
    assert rates["matrix_flops_per_s"] > 1e9
    assert rates["memory_bytes_per_s"] > 1e8
    for name in ("coarse", "fine"):
        part = found["parts"][name]
        assert "failed" not in part, part
        assert part["tokens_per_s"] == pytest.approx(64 / part["step_s"]["median"], rel=1e-3)
        assert 0 < part["mfu"] < 1
        assert all(kind["seconds"] > 0 for kind in part["kinds"].values()), part["kinds"]
        assert (tmp_path / "out" / f"bench_gpu.quick_{name}.trace.json.gz").is_file()
        assert f"\n{name} " in run.stdout
    theirs = found["parts"]["coarse-transformers"]
    assert "skipped" in theirs or theirs["tokens_per_s"] > 0


@pytest.mark.parametrize("name", ["coarse", "fine"])
@pytest.mark.parametrize(("memory", "least"), [(143e9, 0.7), (80e9, 0.6)])
def test_models_fill_a_device(name: str, memory: float, least: float, load: Any) -> None:
    models = load("gpu_models")
    config = models.filling(models.MODELS[name], int(memory))
    assert least * memory < step_memory(config, "gpu").total < 0.92 * memory
    assert config.train.batch_size >= 4
    assert models.filling(models.MODELS[name], 10**9) is None


def test_transformers_knows_the_same_models(load: Any) -> None:
    models = load("gpu_models")
    types = [
        load("bench_gpu")._in_transformers(models.config_of(model, 4))["settings"]["model_type"]
        for model in models.MODELS.values()
    ]
    assert types == ["mixtral", "deepseek_v2"]


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_kinds_share_all_operations_of_the_model(name: str, load: Any) -> None:
    config = load("gpu_models").config_of(load("gpu_models").TOYS[name], 2, 32)
    work = load("roofline").work_by_kind(config)
    assert sum(each.flops for each in work.values()) == pytest.approx(64 * train_flops_per_token(config.model, 32))
    assert all(each.flops or each.num_bytes for each in work.values())


def test_a_kernel_with_wrong_gradients_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, put = load("gpu_kernels"), dict[str, Any]()
    good = GROUPED_PRODUCTS["cpu"]["blocks"]

    def halved(dy: jax.Array, w: jax.Array, size_L: jax.Array, tile: int) -> jax.Array:
        return blocks_dgrad(dy, w, size_L, tile) / 2  # wrong in its gradient alone

    refused = good._replace(forward=lambda *_: 1 / 0)
    products = {"good": good, "wrong": good._replace(dgrad=halved), "refused": refused}
    monkeypatch.setitem(GROUPED_PRODUCTS, "cpu", products)
    kernels.measure(put.update, toy=True)
    assert put["wrong"] == ["wrong 256×4×64×32", "refused 256×4×64×32"]
    errors = put["errors"]["good 256×4×64×32"]
    assert errors.keys() == {"forward", "dgrad", "wgrad"}
    assert 1e-4 < max(errors.values()) < kernels.MOST_ERROR


def test_a_call_resumes_where_the_last_one_ended(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is measured once, the first ones first, unless the commit is another one."""
    bench, ran = load("bench_gpu"), list[str]()
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock.now)

    def run_part(module: str, arguments: dict[str, Any], limit_s: float, keep: Any) -> None:
        ran.append(module)
        clock.now += 100
        rates = {"platform": "cpu", "device": "a b", "memory_bytes": 1, "memory_bytes_per_s": 1.0}
        keep(rates if module == "gpu_rates" else {"failed": "no"} if module == "gpu_races" else {"tokens_per_s": 1})

    monkeypatch.setattr(bench, "run_part", run_part)

    def call() -> bool:
        return bench.Bench(tmp_path, toy=True, minutes=8, resume=True).run(bench.PARTS)

    assert not call()
    assert ran == ["gpu_rates", "gpu_kernels", "gpu_races", "gpu_step", "gpu_transformers"]
    assert not call()
    assert ran[5:] == ["gpu_rates", "gpu_step", "gpu_transformers", "gpu_step", "gpu_step"]
    assert call()
    assert ran[10:] == ["gpu_rates", "gpu_tiles"]
    assert call()
    assert ran[12:] == ["gpu_rates"]
    monkeypatch.setattr(bench, "origin", lambda: {"commit": "other", "jax": "1", "jaxlib": "1", "python": "3"})
    assert not call()
    assert ran[13:15] == ["gpu_rates", "gpu_kernels"]


@pytest.mark.parametrize(("codes", "calls", "code"), [("75 75 0", 3, 0), ("75 75 75", 3, 75), ("75 1", 2, 1)])
def test_the_days_script_calls_until_all_is_measured(codes: str, calls: int, code: int, tmp_path: Path) -> None:
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(f'#!/bin/bash\necho "$@" >> {log}\nexit $(echo {codes} | cut -d" " -f$(wc -l < {log}))\n')
    stub.chmod(0o755)
    run = subprocess.run([FOLDER / "gpu_day.sh", "--toy"], env=os.environ | {"PYTHON": str(stub)})
    assert run.returncode == code
    assert log.read_text().splitlines() == ["profiling/bench_gpu.py --resume --minutes 8 --toy"] * calls


def test_the_page_has_what_was_measured(load: Any) -> None:
    page = load("gpu_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.read_results(FOLDER / "results"))
    race = {"seconds": {"wgrad blocks": 0.002}, "share_of_rate": {"wgrad blocks": 0.5}}
    race["left_out"] = {"wgrad warps": "no"}
    parts = {
        "rates": {"device": "One GPU", "matrix_flops_per_s": 7e14, "memory_bytes_per_s": 4e12},
        "kernels": {"errors": {"blocks": {"forward": 1e-3, "rows_gradient": 2e-3}, "cudnn": {"failed": "none"}}},
        "races": {"fine": race, "wall_s": 1},
        "fine": {
            "blocks": 9,
            "sequences": 4,
            "tokens_per_s": 12345.0,
            "mfu": 0.4,
            "step_s": {"median": 0.5},
            "predicted_step_s": 0.25,
        },
        "coarse": {"failed": "did not end within 125 s"},
        "fine-capacity": {"failed": "not begun, 3 s before the end"},
        "coarse-capacity": {"failed": "not begun, 3 s before the end"},
    }
    made = {"date": "2030-01-02T03:04:05", "commit": "abc", "jax": "1.0"}
    renamed = {"warps": "hopper"}
    text = page.page({"bench_gpu_one.json": {"parts": parts, "renamed": renamed, "provenance": made}})
    for line in (
        "## One GPU",
        "| `fine` | 9 × 4 | 12,345 | 40.0% | 500.0 | 250.0 | – | – | – |",
        "- `coarse`: did not end within 125 s",
        "Not measured, as there was no time left: `fine-capacity`, `coarse-capacity`.",
        "| `blocks` | 2.0e-03 |",
        "| `blocks` | – | – | 2.00 ms, 50% |",
        "`hopper` did not run (wgrad): `no`.",
    ):
        assert line in text.splitlines()


HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %a = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(experts)/dot"}
  %b = f32[4,4]{1,0} negate(%a), metadata={op_name="jit(step)/transpose(jvp(experts))/neg"}
  %c = f32[4,4]{1,0} dot(%b, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/bnd,dhk->bnhk/dot"}
  %d = f32[4,4]{1,0} negate(%c), metadata={op_name="jit(step)/while/body/attention/neg"}
  %e = f32[4,4]{1,0} dot(%d, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/route/dot"}
  %g = f32[4,4]{1,0} dot(%e, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/cross_entropy/while/body/dot"}
  %h = f32[4,4]{1,0} negate(%g), metadata={op_name="jit(step)/cross_entropy/while/body/neg"}
  ROOT %f = f32[4,4]{1,0} negate(%e), metadata={op_name="jit(step)/optimizer/neg"}
}
"""  # noqa: E501


def test_operations_are_of_the_kind_of_their_scope(load: Any) -> None:
    roofline, program = load("roofline"), parse(HLO)
    kinds = {name: roofline.kind_of(program.by_name[name], program) for name in "abcdefgh"}
    assert kinds == {
        "a": roofline.EXPERTS,
        "b": roofline.ELEMENTWISE,
        "c": roofline.DENSE,
        "d": roofline.ATTENTION,
        "e": roofline.ROUTING,
        "f": roofline.OPTIMIZER,
        "g": roofline.DENSE,
        "h": roofline.LOSS,
    }


LOOP = """HloModule jit_step, is_scheduled=true

%body (s: (s32[], f32[1000,1000])) -> (s32[], f32[1000,1000]) {
  %s = (s32[], f32[1000,1000]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000,1000]{1,0} get-tuple-element(%s), index=1
  %y = f32[1000,1000]{1,0} custom-call(%x), custom_call_target="mosaic", metadata={op_name="jit(step)/experts/grouped_rows/f"}
  ROOT %t = (s32[], f32[1000,1000]{1,0}) tuple(%i, %y)
}

ENTRY %main (a: f32[1000,1000]) -> f32[1000,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  %n = f32[1000,1000]{1,0} negate(%a), metadata={op_name="jit(step)/optimizer/neg"}
  %c = s32[] constant(0)
  %p = (s32[], f32[1000,1000]{1,0}) tuple(%c, %n)
  %w = (s32[], f32[1000,1000]{1,0}) while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[1000,1000]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501


def test_kernels_in_loops_count_once_for_each_iteration(load: Any) -> None:
    """By bytes, or by operations if these take longer."""
    roofline = load("roofline")
    target = dataclasses.replace(find_target("h200:1x1x1"), memory_bytes_per_s=8e9, matrix_flops_per_s=2.0**21)
    found = roofline.kernel_seconds(parse(LOOP), target)
    assert found.keys() == {roofline.OPTIMIZER, roofline.EXPERTS}
    assert found[roofline.OPTIMIZER] == pytest.approx(1e-3), "4 MB read, and 4 MB written"
    assert found[roofline.EXPERTS] == pytest.approx(3 * 2 * 1000**3 / 2**21), "rows, and two widths"


PART = """
import os, time

def measure(put, how):
    put({"begun": how})
    if how == "raises":
        raise ValueError("no room\\nat all")
    if how == "dies":
        os._exit(7)
    if how == "hangs":
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ("ends", None),
        ("raises", "ValueError: no room"),
        ("dies", "its process ended with 7"),
        ("hangs", "did not end within 3 s"),
    ],
)
def test_what_a_part_had_is_kept_however_it_ends(
    how: str, failed: str | None, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_part.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)
    kept: list[dict[str, Any]] = []
    found = load("parts").run_part(
        "a_part", {"how": how}, 3.0 if how == "hangs" else 60.0, lambda each: kept.append(dict(each))
    )
    assert found["begun"] == how
    assert found.get("failed") == failed
    assert kept[0] == {"begun": how}
    assert kept[-1] == found
