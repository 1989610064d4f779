"""The planner: what it finds is possible, fits, and is the fastest of what it looked at; what is impossible it says."""

import dataclasses

import pytest

from moe_jax.config import Config, Data, Mesh, Model, MoE, Schedule, Train
from moe_jax.errors import UserError
from moe_jax.plan.candidates import Refused, divisors, on_meshes, schedules
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.plan_text import facts, refusals, table
from moe_jax.plan.planner import PlanError, plan

H100S = find_cluster("h100x16")


def config_of(layers: int = 3, batch_size: int = 64, **moe) -> Config:
    experts = MoE(**({"num_experts": 16, "top_k": 2, "hidden_dim": 1024} | moe))
    model = Model(vocab_size=4096, d_model=1024, num_layers=layers, num_heads=8, hidden_dim=4096, moe=experts)
    return Config(model=model, data=Data(seq_len=512), train=Train(batch_size=batch_size))


def test_every_mesh_of_all_devices_is_tried_or_refused_with_a_reason() -> None:
    config = dataclasses.replace(config_of(), train=Train(batch_size=8))
    found = list(on_meshes(config, H100S))
    meshes = [each.mesh for each in found if isinstance(each, Config)]
    assert {mesh.data * mesh.expert * mesh.tensor for mesh in meshes} == {16}
    assert Mesh(data=1, expert=8, tensor=2) in meshes
    assert max(mesh.tensor for mesh in meshes) == H100S.node_devices, "tensor ranks stay inside a node"
    refused = {each.mesh: each.reason for each in found if isinstance(each, Refused)}
    assert "train.batch_size=8 " in refused["expert=16"]


def test_the_first_plan_is_the_fastest_and_all_plans_fit() -> None:
    plans = plan(config_of(), H100S)
    assert plans.best.estimate.step_s == min(each.estimate.step_s for each in plans.ranked)
    assert plans.best.config.schedule.policy != "vanilla"
    limit = H100S.device.memory_bytes
    assert limit is not None
    assert all(each.memory.total < limit for each in plans.ranked)
    own = [estimate(each, H100S).step_s for each in schedules(plans.best.config)]
    assert plans.best.estimate.step_s <= min(own)


def test_little_memory_makes_a_plan_recompute_or_cut_the_batch() -> None:
    config = config_of(layers=8, batch_size=256)
    small = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, memory_bytes=int(6e9)))
    roomy, tight = plan(config, H100S).best, plan(config, small).best
    assert not roomy.squeezed
    assert tight.squeezed
    assert tight.memory.total < 6e9
    assert tight.estimate.step_s > roomy.estimate.step_s
    assert tight.binds.endswith(", memory")


def test_what_fits_nowhere_is_told_in_one_line_with_a_cluster_where_it_would() -> None:
    with pytest.raises(PlanError, match=r"^nothing trains on h100x8 \(.*needs .* of 85\.0 GB.*\): .*h100x\d+") as error:
        plan(config_of(layers=96, hidden_dim=16384), find_cluster("h100x8"))
    assert "\n" not in str(error.value)


def test_a_batch_that_cannot_be_cut_is_told_with_one_that_can() -> None:
    with pytest.raises(PlanError, match=r"train\.batch_size=3 .*use"):
        plan(config_of(batch_size=3), H100S)


def test_deep_models_take_per_block_what_their_last_block_takes() -> None:
    """A few periods stand for all: the whole model, simulated, takes the same within 2 %."""
    config = dataclasses.replace(
        config_of(layers=12),
        mesh=Mesh(data=1, expert=16),
        schedule=Schedule(policy="unified", microbatches=2, weight_grad="greedy", grad_reduce="chunked", chunk_mb=32),
    )
    few = estimate(config, H100S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_jax.plan.estimate._PERIODS", 100)
        whole = estimate(config, H100S)
    assert len(few.timeline.schedule.shape.kinds) < len(whole.timeline.schedule.shape.kinds) == 12
    assert few.step_s == pytest.approx(whole.step_s, rel=0.02)


def test_faster_links_and_more_devices_make_no_step_slower() -> None:
    config = dataclasses.replace(config_of(), mesh=Mesh(data=1, expert=16))
    levels = tuple(dataclasses.replace(level, bytes_per_s=4 * level.bytes_per_s) for level in H100S.levels)
    assert estimate(config, dataclasses.replace(H100S, levels=levels)).step_s < estimate(config, H100S).step_s
    steps = [plan(config_of(), find_cluster(f"h100x{count}")).best.estimate.step_s for count in (8, 16, 32)]
    assert steps == sorted(steps, reverse=True)


def test_the_text_tells_all_of_it() -> None:
    plans = plan(config_of(), H100S)
    lines = table(plans).splitlines()
    assert lines[0].split()[:3] == ["mesh", "step", "MFU"]
    assert lines[1].startswith(plans.best.mesh)
    assert all(" more " in line for line in lines[2:9])
    assert "16 × H100 SXM" in facts(plans)
    assert "$ per billion tokens" in facts(plans)
    assert refusals(plans).startswith("not ") or not plans.refused


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_unknown_clusters_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean h100"):
        find_cluster("h10x8")
