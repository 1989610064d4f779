"""Saved values of a loop over blocks in host memory: the reference's step, and less memory on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import step_memory
from moe_jax.step.scheduled import saved_values
from moe_jax.step.scheduled.saved_values import SavedValues
from tests.step.one_step import assert_is_the_references_step, config_of_settings

LOOP = "schedule.policy=unified schedule.microbatches=2 schedule.offload_activations=true mesh.expert=2 "
CASES = {
    "sharded parameters": "mesh.data=2 model.num_layers=4 model.moe.moe_layer_freq=1 optimizer.zero=3 "
    "schedule.weight_grad=greedy schedule.grad_reduce=bucketed",
    "recomputed tasks, blocks below and above": "mesh.data=2 model.num_layers=8 "
    "model.moe.moe_layer_freq=1 model.moe.first_k_dense_replace=1 schedule.unroll=2 schedule.remat=full",
}


@pytest.fixture(autouse=True)
def _small_values_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_values, "LARGE_BYTES", 256)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_references(name: str) -> None:
    assert_is_the_references_step(config_of_settings(LOOP + CASES[name]))


@pytest.mark.parametrize("offload", [True, False])
def test_only_large_values_go_to_the_host(offload: bool) -> None:
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (64, 63)]
    saved = SavedValues(shapes, offload)
    stacked = jax.make_jaxpr(lambda values: saved.store(values, saved.before_first())[0])(shapes)
    spaces = [aval.memory_space for aval in stacked.out_avals]
    assert spaces == [jax.memory.Space.Host if offload else jax.memory.Space.Device, jax.memory.Space.Device]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_plan_counts_two_of_ten_iterations(remat: str) -> None:
    settings = ["model.num_layers=10", "mesh.expert=8", "schedule.unroll=1", f"schedule.remat={remat}"]
    whole = load_config("configs/bench/fine_grained.yaml", settings)
    less = dataclasses.replace(whole, schedule=dataclasses.replace(whole.schedule, offload_activations=True))
    before, after = step_memory(whole, "tpu"), step_memory(less, "tpu")
    assert before.moment == "backward", "after the highest block's backward pass, nine store"
    assert after.activations_on_host == pytest.approx(before.activations, rel=1e-3)  # not the highest
    assert after.activations == pytest.approx(2 / 9 * before.activations, rel=1e-3)
    assert after.total < before.total
    assert step_memory(less, "cpu") == step_memory(whole, "cpu")


def test_plans_take_as_long_as_without() -> None:
    """They simulate fewer blocks, which make no loop."""
    whole = load_config("configs/bench/fine_grained.yaml", ["model.num_layers=10", "schedule.unroll=1"])
    less = dataclasses.replace(whole, schedule=dataclasses.replace(whole.schedule, offload_activations=True))
    steps_s = [estimate(config, find_cluster("v5p-8")).step_s for config in (whole, less)]
    assert steps_s[0] == steps_s[1]
