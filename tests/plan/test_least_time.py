"""Lower bounds of a step: no estimate is below them, and they are of use."""

import dataclasses

import pytest

from moe_jax.config import Config
from moe_jax.config.draft import PLANNED, open_draft
from moe_jax.config.yaml_io import load_config
from moe_jax.plan import search
from moe_jax.plan.candidates import choices, guesses, pipelines
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.curves import curve
from moe_jax.plan.estimate import estimate
from moe_jax.plan.least_time import least_step_s
from moe_jax.plan.planner import plan

H100S = find_cluster("h100x16")
MODEL = [
    *("model.hidden_size=1024", "model.num_layers=6", "model.num_attention_heads=8", "model.moe.num_experts=16"),
    *("model.moe.intermediate_size=1024", "data.seq_len=512", "train.batch_size=256", "train.grad_accumulation=4"),
]


def configs() -> list[Config]:
    """Steps with and without stages, tensor ranks, remat and a capacity, under each policy."""
    found = []
    for mesh in ("mesh.expert=16", "mesh.expert=4 mesh.tensor=4", "mesh.expert=4 mesh.pipeline=2 mesh.data=2"):
        base = load_config(None, [*MODEL, "mesh.data=1", "schedule.remat=dots", *mesh.split()])
        orders = pipelines() if base.mesh.pipeline > 1 else ({},)
        overrides = ({"schedule": {**each, **order}} for order in orders for each in guesses())
        found += choices(open_draft(base), base, overrides)
    return found


def test_no_estimate_is_below_its_bound_and_bounds_are_near() -> None:
    shares = [least_step_s(each, H100S) / estimate(each, H100S).step_s for each in configs()]
    assert max(shares) < 1
    assert min(shares) > 0.4
    assert sorted(shares)[len(shares) // 2] > 0.8


def test_measured_times_have_no_bound() -> None:
    """Parts may take less than the whole: here a small product has ten times the rate of a large one."""
    slow = curve("matmul", {"width": 1024}, "flops", [1e9, 1e12], [(each, each, each) for each in (1e-4, 1.0)])
    measured = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, curves=(slow,)))
    assert least_step_s(load_config(None, [*MODEL, "mesh.data=16"]), measured) == 0


def test_bounds_leave_the_plan_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bounds every mesh is simulated."""
    opened = {"mesh.data", "mesh.expert", "mesh.tensor", "schedule.microbatches", "schedule.remat", "optimizer.zero"}
    base = load_config(None, [*MODEL, "model.moe.capacity_factor=null", "schedule.policy=unified"])
    draft = open_draft(base, fixed=PLANNED - opened)
    bounded = plan(draft, H100S)
    monkeypatch.setattr(search, "least_step_s", lambda config, cluster: 0.0)
    simulated = plan(draft, H100S)
    assert simulated.slower == 0
    assert bounded.slower > 0
    assert bounded.config == simulated.config
    assert [each.mesh for each in bounded.ranked[:4]] == [each.mesh for each in simulated.ranked[:4]]
    assert len(bounded.ranked) + bounded.slower == len(simulated.ranked)
