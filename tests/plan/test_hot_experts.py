"""Plans with copies of each step's most loaded experts: what is sent, and the load that is left."""

import dataclasses

import jax
import pytest

from moe_jax.config import Config, PlanConfig
from moe_jax.plan.hot_experts import copied_parameters, copies_bytes, leaving_bytes, load_with_copies
from moe_jax.plan.memory import step_memory
from moe_jax.plan.work import busiest_rows
from tests.small import first_params, small_config


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
    assert busiest_rows(config, 100) == pytest.approx(load * 200)


def test_copies_take_memory_in_each_block_unless_they_are_sent_again():
    own = copied_parameters(copying(3))
    assert copies_bytes(copying(3), 4) == own * (2 * 4 + 4)
    assert copies_bytes(copying(3, schedule={"remat": "full"}), 4) == own * (4 + 4)
    assert copies_bytes(copying(3, schedule={"remat": "full", "policy": "unified"}), 4) == own * (2 * 4 + 4)
    assert step_memory(copying(3), "cpu").total > step_memory(copying(0), "cpu").total
