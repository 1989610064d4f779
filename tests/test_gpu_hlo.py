"""What docs/memory.md claims of steps for one GPU, compared with the committed result, and how the program reads it."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from moe_jax.measure.hlo import parse
from moe_jax.plan.memory import step_memory
from tests.results import percent, result, rows

FOLDER = Path(__file__).parents[1] / "profiling"


@pytest.mark.parametrize("model", ["coarse", "fine"])
def test_one_gpus_step_has_flash_attention_and_no_float32_products(model: str) -> None:
    found = result("gpu_hlo_h200_1x1x1")[model]
    assert found["other_float32_products"] == []
    assert all(found["flash_attention"].values())
    assert abs(found["error"]) <= 0.05
    blocks, sequences, predicted, allocated, error = rows("memory")[model]
    assert (int(blocks), int(sequences)) == (found["blocks"], found["sequences"])
    assert float(predicted) == round(found["predicted_bytes"] / 1e9, 1)
    assert float(allocated) == round(found["allocated_bytes"] / 1e9, 1)
    assert error.lstrip("+").replace("−", "-") == percent(found["error"])


@pytest.mark.parametrize("model", ["coarse", "fine"])
def test_unrolled_blocks_touch_fewer_bytes(model: str) -> None:
    found = result("gpu_hlo_h200_1x1x1")[model]
    steps = {f"{model}, a loop over blocks": found, f"{model}, unrolled": found["unrolled"]}
    for name, step in steps.items():
        kernels, useful, allocated = map(float, rows("memory")[name])
        assert kernels == round(sum(step["kernels"]["ms"].values()), 1)
        assert useful == round(step["kernels"]["useful"], 2)
        assert allocated == round(step["allocated_bytes"] / 1e9, 1)
    loop, unrolled = steps.values()
    assert unrolled["kernels"]["useful"] > 1.25 * loop["kernels"]["useful"]
    assert found["filled"]["kernels"]["useful"] >= {"coarse": 0.6, "fine": 0.5}[model]
    assert unrolled["allocated_bytes"] < 0.8 * loop["allocated_bytes"]


HLO = """HloModule jit_step, is_scheduled=true

%body (x: f32[4,4]) -> f32[4,4] {
  %r = f32[4,4]{1,0} parameter(0)
  ROOT %in_loop = f32[4,4]{1,0} dot(%r, %r), lhs_contracting_dims={1}, metadata={op_name="jit(step)/experts/dot"}
}

ENTRY %main (x: f32[4,4], y: bf16[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %y = bf16[4,4]{1,0} parameter(1)
  %a = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(route)/dot"}
  %b = f32[4,4]{1,0} dot(%y, %y), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(head)/dot"}
  %c = (bf16[2,4,2,2]{3,2,1,0}) custom-call(%y, %y, %y), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %d = f32[4,4]{1,0} fusion(%x), kind=kOutput, calls=%body
}
"""


def test_float32_products_are_distinguished_from_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    read: Any = importlib.import_module("gpu_hlo").read
    assert read(parse(HLO)) == {
        "products": 3,
        "float32_products_of_router": 1,
        "other_float32_products": ["f32[4,4]{1,0} jit(step)/experts/dot"],
        "flash_attention": {"forward": 0, "backward": 1},
    }


def test_unrolled_steps_are_predicted_as_they_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions in the results file are today's, and none is far from what XLA allocated."""
    monkeypatch.syspath_prepend(FOLDER)
    unrolled_memory = importlib.import_module("unrolled_memory")
    found = result("unrolled_memory_h100")["cases"]
    for case, compiled in zip(unrolled_memory.CASES, found.values(), strict=True):
        predicted = step_memory(unrolled_memory.config_of(*case), "gpu").total
        assert predicted == pytest.approx(compiled["predicted_bytes"], rel=0.01), case
        assert predicted == pytest.approx(compiled["allocated_bytes"], rel=0.05), case
