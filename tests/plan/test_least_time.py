"""Lower bounds of a step: no estimate is below them, and they are of use."""

import dataclasses
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from moe_jax.config import Config
from moe_jax.config.draft import PLANNED, open_draft
from moe_jax.config.yaml_io import load_config
from moe_jax.plan import search
from moe_jax.plan.candidates import accumulations, choices, guesses, on_meshes, pipelines, schedules
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.curves import curve
from moe_jax.plan.estimate import estimate
from moe_jax.plan.least_time import least_step_s, least_work_s
from moe_jax.plan.memory import step_memory
from moe_jax.plan.planner import plan
from moe_jax.plan.search import PlanSearch

H100S = find_cluster("h100x16")
V5PS = find_cluster("v5p-16")
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


def test_the_bound_of_a_stage_counts_the_forward_pass_that_is_run_again() -> None:
    mesh = ["mesh.expert=4", "mesh.pipeline=2", "mesh.data=2"]
    config = load_config(None, [*MODEL, *mesh, "schedule.policy=unified", "schedule.remat=chunk"])
    assert 0.9 < least_step_s(config, H100S) / estimate(config, H100S).step_s < 1


def random_configs(seed: int, count: int) -> list[Config]:
    """Valid steps with random meshes, ZeRO stages, schedules, sums and gathers of parameters, on one or two nodes."""
    rng = random.Random(seed)
    bases = [
        load_config(None, [*MODEL, "mesh.data=16", "optimizer.zero=3", f"schedule.param_gather={gather}"])
        for gather in ("prefetch", "block")
    ]
    bases += [replace(bases[0], model=replace(bases[0].model, moe=replace(bases[0].model.moe, moe_layer_freq=2)))]
    found: dict[Config, None] = {}
    while len(found) < count:
        base = rng.choice(bases)
        sizes = dict.fromkeys(base.mesh.sizes, 1)
        for _ in range(4):
            sizes[rng.choice(list(sizes))] *= 2
        schedule = {**rng.choice([*schedules(), *guesses()]), "remat": rng.choice(("none", "dots", "full", "chunk"))}
        if rng.random() < 0.7:
            schedule |= {"grad_reduce": rng.choice(("end", "block")), "bucket_cap_mb": None}
        if sizes["pipeline"] > 1:
            schedule |= rng.choice(list(pipelines()))
        overrides = {
            "mesh": sizes,
            "train": {"grad_accumulation": rng.choice((1, 2, 4))},
            "optimizer": {"zero": 3 if base is bases[1] else rng.choice((0, 1, 2, 3, 3))},
            "schedule": schedule,
            "exchange": {"tensor_form": rng.choice(("sharded", "sharded_scheduled"))},
        }
        found |= dict.fromkeys(choices(open_draft(base), base, [overrides]))
    return list(found)


@pytest.mark.parametrize("seed", range(4))
def test_no_estimate_of_a_random_step_is_below_its_bounds(seed: int) -> None:
    for config in random_configs(seed, 40):
        for cluster in (H100S, V5PS):
            step_s = estimate(config, cluster).step_s
            assert least_step_s(config, cluster) <= step_s, config
            assert least_work_s(config, cluster, config.train.grad_accumulation) <= step_s, config


def test_the_bound_of_a_plain_step_with_gathers_is_its_time() -> None:
    """Nothing overlaps but the gathers of experts' parameters with attention."""
    for zero in (0, 1, 3):
        config = load_config(None, [*MODEL, "mesh.data=16", f"optimizer.zero={zero}", "model.moe.num_experts=8"])
        assert least_step_s(config, H100S) > 0.93 * estimate(config, H100S).step_s


def test_a_mesh_has_no_config_below_its_bound() -> None:
    """The bound of a mesh, from the work of its simplest config that recomputes as much, against those of all that fit.

    With little memory, some configs recompute.
    """
    largest = {"none": 0.0, "dots": 0.0, "full": 0.0}  # shares that bounds have of the best time that fits
    for memory_factor in (1.0, 16.0):
        search = PlanSearch(open_draft(load_config(None, [*MODEL, "mesh.data=16"])), H100S, memory_factor)
        bases = [each for each in on_meshes(search.draft, H100S) if isinstance(each, Config)]
        fitting = [each for each in bases if search.fitting.fits_at_all(each)]
        assert len(fitting) > 10
        for base, remat in itertools.product(fitting, largest):
            share = search.least_s(base, remat) / search.mesh_configs(base, remat).least_s
            assert share <= 1
            largest[remat] = max(largest[remat], share)
    assert min(largest.values()) > 0.6


def test_the_work_of_a_step_is_that_of_its_longest_stage() -> None:
    """The head of a large vocabulary is most of the work, and the other stage waits for it."""
    more = ["mesh.data=8", "model.moe.num_experts=8", "model.vocab_size=262144"]
    whole, staged = (load_config(None, [*MODEL, *more, f"mesh.pipeline={stages}"]) for stages in (1, 2))
    assert least_work_s(staged, H100S, 4) > 0.7 * least_work_s(whole, H100S, 4)
    assert least_work_s(staged, H100S, 4) < estimate(staged, H100S).step_s


def test_a_bound_counts_the_tasks_of_all_microbatches() -> None:
    """Small products take longer, and nothing else differs: with a wide network compute is all that a step takes."""
    settings = [*MODEL, "mesh.expert=16", "mesh.data=1", "train.grad_accumulation=1", "schedule.policy=unified"]
    bounds_s = [
        least_step_s(load_config(None, [*settings, f"schedule.microbatches={parts}"]), H100S) for parts in (2, 8, 16)
    ]
    assert bounds_s[0] < bounds_s[1] < bounds_s[2]


def test_measured_times_have_no_bound() -> None:
    """Parts may take less than the whole: here a small product has ten times the rate of a large one."""
    slow = curve("matmul", {"width": 1024}, "flops", [1e9, 1e12], [(each, each, each) for each in (1e-4, 1.0)])
    measured = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, curves=(slow,)))
    assert least_step_s(load_config(None, [*MODEL, "mesh.data=16"]), measured) == 0


_OPENED = {"mesh.data", "mesh.expert", "mesh.tensor", "schedule.microbatches", "schedule.remat", "optimizer.zero"}


@pytest.mark.parametrize("more", [set[str](), {"mesh.pipeline", "train.grad_accumulation", "schedule.pipeline"}])
def test_bounds_leave_the_plan_as_it_is(monkeypatch: pytest.MonkeyPatch, more: set[str]) -> None:
    """Without bounds every mesh is simulated."""
    base = load_config(None, [*MODEL, "model.moe.capacity_factor=null", "schedule.policy=unified"])
    draft = open_draft(base, fixed=PLANNED - _OPENED - more)
    bounded = plan(draft, H100S)
    for bound in ("least_step_s", "least_work_s"):
        monkeypatch.setattr(search, bound, lambda *_: 0.0)
    simulated = plan(draft, H100S)
    assert simulated.slower == 0
    assert bounded.slower > 0
    assert bounded.config == simulated.config
    assert [each.mesh for each in bounded.ranked[:4]] == [each.mesh for each in simulated.ranked[:4]]
    assert len(bounded.ranked) + bounded.slower == len(simulated.ranked)


@pytest.mark.parametrize("memory_gb", [0.6, 0.8, 1.2, 2.0])
def test_what_fits_is_found_without_trying_all_of_it(memory_gb: float) -> None:
    """A search that stops early finds that a mesh fits, or does not, as one that tries every number of parts does."""
    device = dataclasses.replace(H100S.device, memory_bytes=int(memory_gb * 1e9))
    draft = open_draft(load_config(None, [*MODEL, "mesh.data=16", "train.grad_accumulation=1"]))
    search = PlanSearch(draft, dataclasses.replace(H100S, device=device), 1.0)
    found = Counter[bool]()
    for base in (each for each in on_meshes(draft, H100S) if isinstance(each, Config) and each.mesh.context == 1):
        for zero, remat in itertools.product((0, 1, 3), ("none", "full")):
            saving = {"optimizer": {"zero": zero}}
            tried = choices(
                draft,
                base,
                (
                    {**saving, "schedule": {"remat": remat, **each}, "train": {"grad_accumulation": parts}}
                    for parts in accumulations(base)
                    for each in guesses()
                ),
            )
            fits = any(search.fitting.memory.has_room(step_memory(each, "gpu").total) for each in tried)
            assert search.fitting._fits_somehow(base, zero, remat) == fits, (base.mesh, zero, remat)
            found[fits] += 1
    assert set(found) == {True, False}
