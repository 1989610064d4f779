"""Hill climbing of experts between ranks, the swaps that get there, and whether they pay."""

import dataclasses
import itertools

import numpy as np
import pytest

from moe_jax.config import Config, MeshConfig, MigrationConfig, OptimizerConfig
from moe_jax.plan.clusters import find_cluster
from moe_jax.rebalance.hill_climb import ExpertPlacement, hill_climb_placement
from moe_jax.rebalance.moves import Move, moves_between, transfer_rounds
from moe_jax.rebalance.planner import Prices, is_due, load_ratio, migration_costs, num_copied, num_swaps, plan

SKEWS = {
    "sorted": 1 / np.sqrt(np.arange(1, 65)),
    "two hot ranks": np.where(np.arange(64) < 16, 3.5, 0.5),
    "steps": np.repeat([6.0, 2.0, 1.0, 1.0], 16) + 0.01 * np.arange(64),
}


def random_loads(seed: int, experts: int) -> list[float]:
    return np.random.default_rng(seed).gamma(1.0, size=experts).tolist()


@pytest.mark.parametrize("name", SKEWS)
def test_64_experts_on_8_ranks_come_below_1_15(name):
    load, slots = SKEWS[name].tolist(), range(64)
    assert load_ratio(load, slots, 8) >= 2
    assert plan(load, slots, 8, None).ratio_after <= 1.15


@pytest.mark.parametrize("seed", range(20))
def test_each_swap_lowers_the_busiest_rank_or_how_many_are_as_busy(seed):
    load, slots = random_loads(seed, 24), tuple(range(24))
    before = sorted(ExpertPlacement.of(load, slots, 4).busy_P, reverse=True)
    for after in hill_climb_placement(load, slots, 4):
        assert sorted(after) == list(range(24)), "every slot has one expert"
        new = sorted(ExpertPlacement.of(load, after, 4).busy_P, reverse=True)
        assert new < before
        before = new


@pytest.mark.parametrize("seed", range(10))
def test_small_cases_come_near_the_best_of_all_placements(seed):
    """The best one is found by trying all; no pair of the busiest rank can lower it any more at the end."""
    load = random_loads(seed, 6)
    best = min(load_ratio(load, slots, 2) for slots in itertools.permutations(range(6)))
    found = plan(load, range(6), 2, None)
    assert best - 1e-9 <= found.ratio_after <= 1.2 * best or found.moves == ()
    for one, two in itertools.combinations(range(6), 2):
        slots = list(found.expert_S)
        slots[one], slots[two] = slots[two], slots[one]
        assert load_ratio(load, slots, 2) >= found.ratio_after - 1e-6, "a swap that helps was left out"


def test_equal_loads_move_nothing():
    assert plan([1.0] * 16, range(16), 4, None).moves == ()
    assert plan([0.0] * 16, range(16), 4, None).ratio_before == 1


def made(moves: tuple[Move, ...], slots: list[int]) -> list[int]:
    """What slots hold after moves."""
    slots = list(slots)
    for first, second, copies in moves:
        slots[first], slots[second] = slots[first if copies else second], slots[first]
    return slots


@pytest.mark.parametrize("seed", range(10))
def test_swaps_lead_to_the_ranks_that_were_asked_for(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.permutation(24).tolist(), rng.permutation(24).tolist()
    moves, slots = moves_between(old, new, 4, 24)
    assert made(moves, old) == list(slots)
    assert on_ranks(slots, 4, 24) == on_ranks(new, 4, 24)
    moved = sum(map(len, (new - old for old, new in zip(on_ranks(old, 4, 24), on_ranks(new, 4, 24), strict=True))))
    assert moved / 2 <= len(moves) < moved
    assert not any(move.copies for move in moves)


def on_ranks(expert_S, ranks: int, experts: int) -> list[set[int]]:
    """The experts of each rank."""
    return [{*own} - {experts} for own in np.reshape(expert_S, (ranks, -1)).tolist()]


def random_copies(rng: np.random.Generator, experts: int, ranks: int, held: int) -> list[int]:
    """Slots of ranks with all experts somewhere, some on several ranks, and some free slots."""
    own = [{*part} for part in np.split(rng.permutation(experts), ranks)]
    for _ in range(2 * ranks):
        rank, expert = int(rng.integers(ranks)), int(rng.integers(experts))
        if len(own[rank]) < held:
            own[rank].add(expert)
    return [int(e) for each in own for e in rng.permutation([*each, *[experts] * (held - len(each))])]


@pytest.mark.parametrize("seed", range(10))
def test_moves_lead_to_the_copies_that_were_asked_for(seed):
    """No expert is lost on the way, and each missing one is sent once: by a swap, or over an unused slot."""
    rng = np.random.default_rng(seed)
    old, new = (random_copies(rng, 12, 4, 5) for _ in range(2))
    moves, slots = moves_between(old, new, 4, 12)
    assert on_ranks(slots, 4, 12) == on_ranks(new, 4, 12)
    assert len(slots) == sum(map(len, on_ranks(slots, 4, 12))) + slots.count(12), "no rank has an expert twice"
    content = made(moves, old)
    assert all(slot in (expert, 12) for expert, slot in zip(content, slots, strict=True))
    missing = sum(len(b - a) for a, b in zip(on_ranks(old, 4, 12), on_ranks(new, 4, 12), strict=True))
    assert len(moves) <= missing
    for number in range(len(moves)):
        assert {*range(12)} <= {*made(moves[:number], old)}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_trips_make_the_same_moves_and_no_rank_sends_two_experts_one_way(ranks):
    rng, held, rows = np.random.default_rng(ranks), 3, 2
    moves = []
    for _ in range(40):
        one, two = rng.choice(ranks, 2, replace=False)
        slots = int(one * held + rng.integers(held)), int(two * held + rng.integers(held))
        moves.append((int(rng.integers(2)), int(rng.integers(rows)), Move(*slots, copies=bool(rng.integers(2)))))
    rounds = transfer_rounds(moves, held, ranks)
    assert len(rounds) < len(moves), "some are made at once"
    content = {place: place for place in itertools.product(range(2), range(rows), range(held * ranks))}
    expected = dict(content)
    for stage, row, (first, second, copies) in moves:
        a, b = (stage, row, first), (stage, row, second)
        expected[a], expected[b] = expected[a if copies else b], expected[a]
    for one in rounds:
        senders = []
        for stage, row, first, second, first_gets, second_gets in one.moves:
            assert (second // held - first // held) % ranks == one.shift <= ranks / 2
            a, b = (stage, row, first), (stage, row, second)
            content[a], content[b] = content[b if first_gets else a], content[a if second_gets else b]
            senders += [(stage, first // held, "up")]
            senders += [(stage, second // held, "up" if 2 * one.shift == ranks else "down")]
        assert len(set(senders)) == len(senders)
        assert one.sent_experts(ranks) == (1 if 2 * one.shift == ranks else 2)
    assert content == expected


def test_a_move_has_to_pay_back():
    load = SKEWS["sorted"].tolist()
    all_that_help = plan(load, range(64), 8, None)
    free = plan(load, range(64), 8, Prices(0.0, 1.0, 100))
    assert free.ratio_after <= all_that_help.ratio_after
    assert free.pays
    dear = plan(load, range(64), 8, Prices(1.0, 0.1, 100))
    assert dear.pays
    assert 0 < len(dear.moves) < len(free.moves), "swaps that cost more than they bring are left out"
    assert dear.saved_s * 100 > dear.cost_s
    refused = plan(load, range(64), 8, Prices(1.0, 1e-4, 100))
    assert not refused.pays
    assert refused.cost_s > refused.saved_s * 100
    assert not plan(load, range(64), 8, Prices(1.0, 0.0, 100)).pays, "padding: no rank waits for the busiest one"


# the first of 64 experts on 8 ranks has four times a rank's mean load
HOT = [32.0, *np.linspace(0.2, 0.8, 63).tolist()]
ROOM = [e for rank in range(8) for e in (*range(8 * rank, 8 * rank + 8), 64)]  # one free slot on each rank


def test_an_expert_with_four_times_a_ranks_mean_load_needs_copies():
    alone, with_copies = plan(HOT, range(64), 8, None), plan(HOT, ROOM, 8, None, 1.1)
    assert alone.ratio_after > 3.9
    assert with_copies.ratio_after < 1.1
    assert num_copied(with_copies.expert_S, 64) == 1, "of no other"
    assert {*with_copies.expert_S} >= {*range(64)}
    for before, after in itertools.pairwise(hill_climb_placement(HOT, ROOM, 8)):
        old, new = (sorted(ExpertPlacement.of(HOT, slots, 8).busy_P, reverse=True) for slots in (before, after))
        assert new < old
        assert len(after) == sum(map(len, on_ranks(after, 8, 64))) + after.count(64), "no rank has an expert twice"
    again = plan(HOT, with_copies.expert_S, 8, None)
    assert again.ratio_after <= with_copies.ratio_after + 1e-9


def test_copies_pay_by_what_their_sums_cost_in_every_step():
    cheap = plan(HOT, ROOM, 8, Prices(1e-3, 1.0, 1000, sum_s=0.1), 1.1)
    assert cheap.pays
    assert cheap.ratio_after < 1.1
    assert cheap.saved_s == pytest.approx(cheap.ratio_before - cheap.ratio_after - 0.1)
    assert cheap.cost_s == pytest.approx(1e-3 * (num_swaps(cheap) + (len(cheap.moves) - num_swaps(cheap)) / 2))
    assert not plan(HOT, ROOM, 8, Prices(1e-3, 1.0, 1000, sum_s=10.0)).pays


def test_copies_that_are_not_needed_are_given_up():
    """They cost sums in every step, and are gone without anything being sent."""
    copied = plan(HOT, ROOM, 8, Prices(1e-3, 1.0, 1000, sum_s=0.1), 1.1).expert_S
    assert not is_due(HOT, copied, 8, 1.2)
    even = [1.0] * 64
    assert is_due(even, copied, 8, 1.5), "balanced without them, too"
    found = plan(even, copied, 8, Prices(1e-3, 1.0, 1000, sum_s=0.1), 1.5)
    assert found.pays
    assert num_copied(found.expert_S, 64) == 0
    assert sorted(found.expert_S) == [*range(64), *[64] * 8]


def test_an_average_is_sent_but_not_summed():
    """Sums of an expert's gradients over its copies cost the same with a moving average; moving it costs more."""
    config = Config(mesh=MeshConfig(expert=8), migration=MigrationConfig(enabled=True, payback_steps=None))
    averaging = dataclasses.replace(config, optimizer=OptimizerConfig(ema_decay=0.9))
    without, with_one = (
        migration_costs(each, find_cluster("h100x8"), arrays * 1e8) for each, arrays in ((config, 3), (averaging, 4))
    )
    assert with_one.sum_s == pytest.approx(without.sum_s)
    assert with_one.send_s > without.send_s
