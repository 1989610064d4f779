"""What devices send to each other if ZeRO shards over some of the mesh's axes only."""

import dataclasses
from typing import Literal

import pytest

from moe_jax.config import Config, OptimizerConfig
from moe_jax.config.draft import open_draft
from moe_jax.config.yaml_io import load_draft
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.estimate import update_seconds
from moe_jax.plan.gradients import ShardGroups, parts_of, shard_groups, sums_of
from moe_jax.plan.memory import step_memory
from moe_jax.plan.param_gathers import param_gathers
from moe_jax.plan.planner import plan
from tests.small import small_config

CLUSTER = find_cluster("h100x64")  # 8 nodes of 8 devices
COSTS = CollectiveCosts(CLUSTER)


def sharded(stage: Literal[1, 3], axes: tuple[Literal["data", "expert"], ...] | None) -> Config:
    config = small_config(
        8, 8, model={"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}, batch_size=64
    )
    return dataclasses.replace(config, optimizer=OptimizerConfig(zero=stage, zero_axes=axes))


def test_shards_lie_inside_a_node() -> None:
    config = sharded(3, ("expert",))
    mesh, node, across = config.mesh.sizes, DeviceGroup(8, 1), DeviceGroup(8, 8)
    everyone, data = DeviceGroup(64, 1), DeviceGroup(8, 8)
    assert shard_groups(config, mesh) == {
        everyone: ShardGroups(shards=node, same=across),
        data: ShardGroups(shards=DeviceGroup(1, 8), same=across),
    }
    assert parts_of(config, mesh) == {everyone: 8, data: 1}
    gathers = [each for owner in param_gathers(config, mesh) for op in owner.values() for each in op]
    assert {each.group for each in gathers if each.sent_bytes} == {node}
    assert not COSTS.leaves_node(node)


def test_naming_all_axes_is_naming_none() -> None:
    whole, named = sharded(3, None), sharded(3, ("data", "expert"))
    mesh = whole.mesh.sizes
    assert parts_of(named, mesh) == parts_of(whole, mesh)
    for one, other in zip(sums_of(named, mesh, None), sums_of(whole, mesh, None), strict=True):
        assert [each.seconds(COSTS) for each in one] == pytest.approx([each.seconds(COSTS) for each in other])


def test_gathers_are_faster_and_the_state_is_larger() -> None:
    whole, hybrid = sharded(1, None), sharded(1, ("expert",))
    assert update_seconds(hybrid, CLUSTER, COSTS) < update_seconds(whole, CLUSTER, COSTS)
    assert step_memory(hybrid, "gpu").optimizer > 4 * step_memory(whole, "gpu").optimizer


def test_between_nodes_go_the_sums_of_shards() -> None:
    config = sharded(3, ("expert",))
    embedding, *_ = sums_of(config, config.mesh.sizes, None)[0]
    node, across = DeviceGroup(8, 1), DeviceGroup(8, 8)
    own_bytes = embedding.num_bytes / 8
    expected = COSTS.ring(7 * own_bytes, node, "reduce_scatter") + COSTS.ring(
        2 * 7 / 8 * own_bytes, across, "all_reduce"
    )
    assert embedding.seconds(COSTS) == pytest.approx(expected)


def test_a_plan_cannot_choose_whether_chosen_axes_shard() -> None:
    message = r"leaves a plan no choice of optimizer\.zero: set optimizer\.zero=1, 2 or 3"
    with pytest.raises(ConfigError, match=f"{message}, or optimizer"):
        plan(load_draft(None, ["optimizer.zero=auto", "optimizer.zero_axes=[expert]"]), CLUSTER)
    in_file = load_draft(None, ["optimizer.zero=1", "optimizer.zero_axes=[expert]"])
    with pytest.raises(ConfigError, match=f"{message} on the command line, or optimizer"):
        plan(open_draft(in_file), CLUSTER)


def test_a_stage_that_is_given_is_planned_over_its_axes() -> None:
    given = ["optimizer.zero=1", "optimizer.zero_axes=[expert]", "model.num_layers=2", "train.batch_size=64"]
    best = plan(open_draft(load_draft(None, given), fixed={"optimizer.zero"}), CLUSTER).best.config.optimizer
    assert (best.zero, best.zero_axes) == (1, ("expert",))
