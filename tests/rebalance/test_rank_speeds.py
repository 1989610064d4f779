"""Ranks of different speeds: how many experts each holds, and what moves and copies do for the slowest."""

import dataclasses
import itertools

import numpy as np
import pytest

from moe_jax.config import Config, MeshConfig, MigrationConfig, MoEConfig
from moe_jax.config.expert_shares import expert_counts
from moe_jax.config.sections import ModelConfig
from moe_jax.models.placement import first_experts
from moe_jax.plan.clusters import find_cluster
from moe_jax.rebalance.hill_climb import ExpertPlacement, hill_climb_placement
from moe_jax.rebalance.planner import Prices, is_due, load_ratio, migration_costs, num_copied, plan

SPEEDS = (4 / 3, 4 / 3, 2 / 3, 2 / 3)  # relative to their mean
ROOM = first_experts(16, 4, 4).tolist()  # four free positions on each rank


@pytest.mark.parametrize("speeds", [(1, 1), (1, 0.5), (1, 0.4, 0.3), (3, 1, 1)])
@pytest.mark.parametrize("room", [0, 1, 3, 12])
def test_no_other_counts_are_computed_sooner(speeds, room):
    experts = 4 * len(speeds)
    most = experts // len(speeds) + room
    counts = expert_counts(experts, speeds, most)
    assert sum(counts) == experts
    assert max(counts) <= most

    def slowest(counts):
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    possible = (each for each in itertools.product(range(most + 1), repeat=len(speeds)) if sum(each) == experts)
    assert slowest(counts) == min(map(slowest, possible))


def test_equal_speeds_are_equal_shares():
    assert expert_counts(16, (2.0,) * 4, 8) == (4,) * 4
    np.testing.assert_array_equal(first_experts(16, 4, 2, (1.0,) * 4), first_experts(16, 4, 2))
    np.testing.assert_array_equal(first_experts(6, 2, 1, (1.5, 0.5)), [0, 1, 2, 3, 4, 5, 6, 6])


@pytest.mark.parametrize("seed", range(5))
def test_equal_speeds_plan_as_no_speeds(seed):
    load = np.random.default_rng(seed).gamma(1.0, size=16).tolist()
    for prices in (None, Prices(1e-3, 1.0, 100, sum_s=0.01)):
        assert plan(load, ROOM, (1.0,) * 4, prices, 1.1) == plan(load, ROOM, 4, prices, 1.1)


@pytest.mark.parametrize("seed", range(10))
def test_slow_ranks_get_fewer_or_less_loaded_experts(seed):
    load = np.random.default_rng(seed).gamma(1.0, size=16).tolist()
    assert load_ratio(load, ROOM, SPEEDS) > load_ratio(load, plan(load, ROOM, SPEEDS, None).expert_S, SPEEDS)
    before = sorted(ExpertPlacement.of(load, ROOM, SPEEDS).busy_P, reverse=True)
    for after in hill_climb_placement(load, ROOM, SPEEDS):
        new = sorted(ExpertPlacement.of(load, after, SPEEDS).busy_P, reverse=True)
        assert new < before
        assert {*after} >= {*range(16)}
        before = new
    swapped = plan(load, range(16), SPEEDS, None)
    assert sorted(swapped.expert_S) == [*range(16)], "without free positions, ranks hold equally many"
    assert swapped.ratio_after < load_ratio(load, range(16), SPEEDS)


def test_equal_loads_become_as_even_as_the_first_placement():
    """Which is the best one: the busiest ranks take as long as 4.5 experts at mean speed."""
    first = first_experts(16, 4, 4, SPEEDS).tolist()
    counts = [sum(expert < 16 for expert in first[8 * rank : 8 * rank + 8]) for rank in range(4)]
    assert counts == [6, 6, 2, 2]
    found = plan([1.0] * 16, ROOM, SPEEDS, None)
    assert found.ratio_after <= load_ratio([1.0] * 16, first, SPEEDS) + 1e-9
    assert not is_due([1.0] * 16, first, SPEEDS, 1.2)
    assert is_due([1.0] * 16, ROOM, SPEEDS, 1.2)


def test_copies_share_a_load_by_speed():
    placed = ExpertPlacement.of([3.0, 1.0], [0, 1, 0, 2], (1.5, 0.5))
    assert placed.load_S == (2.25, 1.0, 0.75, 0.0)
    assert placed.busy_P == (3.25 / 1.5, 0.75 / 0.5)
    assert placed.ratio == pytest.approx(2 * 3.25 / 1.5 / 4)


def test_a_hot_expert_is_copied_to_the_ranks_that_have_time():
    hot = [16.0, *[1.0] * 15]
    found = plan(hot, ROOM, SPEEDS, None, 1.05)
    assert num_copied(found.expert_S, 16) >= 1
    assert found.ratio_after < 1.1
    alone = plan(hot, range(16), SPEEDS, None)
    assert alone.ratio_after > found.ratio_after


def test_what_moves_save_is_priced_at_the_speed_of_ranks():
    """At even loads all ranks take as long as one of mean speed, and the fastest one is a device of the cluster."""
    moe = MoEConfig(num_experts=8, capacity_factor=None)
    config = Config(
        model=ModelConfig(moe=moe), mesh=MeshConfig(data=1, expert=2), migration=MigrationConfig(enabled=True)
    )
    slow = dataclasses.replace(config, migration=MigrationConfig(enabled=True, rank_speeds=(2.0, 1.0)))
    costs, slow_costs = (migration_costs(each, find_cluster("h100x2"), 1e8) for each in (config, slow))
    assert slow_costs.even_s == pytest.approx(costs.even_s * 4 / 3)
    assert slow_costs.send_s == costs.send_s
