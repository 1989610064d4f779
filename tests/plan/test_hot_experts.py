"""Plans with copies of each step's most loaded experts: what is sent, and the load that is left."""

import dataclasses

import jax
import pytest

from moe_jax.config import Config, PlanConfig
from moe_jax.config.draft import open_draft
from moe_jax.plan.candidates import on_meshes
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts
from moe_jax.plan.exchange_times import ExchangeTimes
from moe_jax.plan.hot_experts import (
    copied_parameters,
    copies_bytes,
    leaving_bytes,
    load_with_copies,
    stored_copies_bytes,
)
from moe_jax.plan.memory import step_memory
from moe_jax.plan.traffic import traffic
from moe_jax.plan.work import busiest_rows
from tests.small import first_params, small_config

V5P = find_cluster("v5px8")


def copying(experts: int, load: float = 2.4, **settings) -> Config:
    exchange = {"rank_capacity_factor": None, "hot_experts": experts}
    config = small_config(2, 4, capacity_factor=None, moe_layer_freq=1, exchange=exchange, **settings)
    return dataclasses.replace(config, plan=PlanConfig(load_factor=load))


def test_copies_are_whole_experts():
    config = copying(3)
    (segment,) = first_params(config.model)["segments"].values()
    one_block = sum(leaf[0].size for leaf in jax.tree.leaves(segment[0]["moe"]["experts"]))
    assert copied_parameters(config) == one_block / config.model.moe.num_experts * 3
    forward, backward = leaving_bytes(config, 4, 2)
    assert forward == 2 * 3 / 4 * 2 * copied_parameters(config)
    assert backward == 2 * forward
    assert copied_parameters(copying(0)) == 0


@pytest.mark.parametrize(("experts", "load"), [(0, 2.4), (1, 2.4 * (1 - 3 / 8)), (2, 1.0), (8, 1.0)])
def test_copies_lower_the_load_of_the_busiest_rank(experts, load):
    """It has two experts, of whose rows a quarter stays if both are copied; below an even share there is nothing."""
    config = copying(experts)
    assert load_with_copies(config, config.mesh.sizes, 2.4) == pytest.approx(load)
    assert busiest_rows(config, 100, "tpu") == pytest.approx(load * 200)


@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("full", 2)])
def test_traffic_of_experts_has_copies(remat: str, times: int) -> None:
    """Of two blocks in a step of one part."""
    with_copies, without = (traffic(copying(experts, schedule={"remat": remat}), V5P)["expert"] for experts in (3, 0))
    forward, backward = leaving_bytes(copying(3), 4, 4)
    assert with_copies - without == pytest.approx(2 * (times * forward + backward))


def test_copies_take_memory_in_each_block_unless_they_are_sent_again():
    own = copied_parameters(copying(3))
    again = copying(3, schedule={"remat": "full"})
    assert stored_copies_bytes(copying(3), 2) == own * 2
    assert stored_copies_bytes(again, 2) == 0
    assert copies_bytes(copying(3), 2) == own * 4
    assert copies_bytes(again, 2) == own * (2 + 4)
    assert step_memory(copying(3), "cpu").total > step_memory(copying(0), "cpu").total


def test_slots_of_pipeline_stages_have_copies():
    """A stage of two blocks stores those of two microbatches in flight."""
    stages = {"pipeline": 2, "grad_accumulation": 4, "model": {"num_layers": 4}}
    with_copies, without, again = (
        step_memory(copying(experts, **stages, schedule={"remat": remat}), "cpu").total
        for experts, remat in ((3, "none"), (0, "none"), (3, "full"))
    )
    assert with_copies - without > 2 * 2 * stored_copies_bytes(copying(3, **stages), 4)
    assert again < with_copies


def test_weights_that_are_sent_again_take_time_in_the_backward_pass():
    once, again = (
        ExchangeTimes(copying(3, schedule={"remat": remat}), CollectiveCosts(V5P), V5P.device).copies_s
        for remat in ("none", "full")
    )
    assert again == (once[0], once[0] + once[1])


def test_with_copies_meshes_have_whole_experts_on_tensor_ranks() -> None:
    """Experts that tensor ranks share are not copied, so such meshes would be lost."""
    draft = open_draft(copying(2))
    meshes = [each.mesh for each in on_meshes(draft, find_cluster("h100x8")) if isinstance(each, Config)]
    assert any(mesh.tensor > 1 for mesh in meshes)
    assert all(mesh.experts_over_tensor == (mesh.tensor > 1) for mesh in meshes)
