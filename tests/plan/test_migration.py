"""Hill climbing of experts between ranks, the swaps that get there, and whether they pay."""

import itertools

import numpy as np
import pytest

from moe_jax.plan.migration import Prices, Swap, climb, load_ratio, plan, rank_loads, swaps_between, trips_of

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
    before = sorted(rank_loads(load, slots, 4), reverse=True)
    for after in climb(load, slots, 4):
        assert sorted(after) == list(range(24)), "every slot has one expert"
        new = sorted(rank_loads(load, after, 4), reverse=True)
        assert new < before
        before = new


@pytest.mark.parametrize("seed", range(10))
def test_small_cases_come_near_the_best_of_all_placements(seed):
    """The best one is found by trying all; no pair of the busiest rank can lower it any more at the end."""
    load = random_loads(seed, 6)
    best = min(load_ratio(load, slots, 2) for slots in itertools.permutations(range(6)))
    found = plan(load, range(6), 2, None)
    assert best - 1e-9 <= found.ratio_after <= 1.2 * best or found.swaps == ()
    for one, two in itertools.combinations(range(6), 2):
        slots = list(found.slot_E)
        slots[one], slots[two] = slots[two], slots[one]
        assert load_ratio(load, slots, 2) >= found.ratio_after - 1e-6, "a swap that helps was left out"


def test_equal_loads_move_nothing():
    assert plan([1.0] * 16, range(16), 4, None).swaps == ()
    assert plan([0.0] * 16, range(16), 4, None).ratio_before == 1


def made(swaps: tuple[Swap, ...], slots: list[int]) -> list[int]:
    """Where experts are after swaps of what slots hold."""
    expert_of = {slot: expert for expert, slot in enumerate(slots)}
    for first, second in swaps:
        expert_of[first], expert_of[second] = expert_of[second], expert_of[first]
    return [slot for expert, slot in sorted((expert, slot) for slot, expert in expert_of.items())]


@pytest.mark.parametrize("seed", range(10))
def test_swaps_lead_to_the_ranks_that_were_asked_for(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.permutation(24).tolist(), rng.permutation(24).tolist()
    swaps, slots = swaps_between(old, new, 4)
    assert made(swaps, old) == list(slots)
    assert [slot // 6 for slot in slots] == [slot // 6 for slot in new]
    moved = sum(a // 6 != b // 6 for a, b in zip(old, new, strict=True))
    assert moved / 2 <= len(swaps) < moved


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_trips_make_the_same_swaps_and_no_rank_sends_two_experts_one_way(ranks):
    rng, held, rows = np.random.default_rng(ranks), 3, 2
    swaps = []
    for _ in range(40):
        one, two = rng.choice(ranks, 2, replace=False)
        slots = Swap(int(one * held + rng.integers(held)), int(two * held + rng.integers(held)))
        swaps.append((int(rng.integers(2)), int(rng.integers(rows)), slots))
    trips = trips_of(swaps, held, ranks)
    assert len(trips) < len(swaps), "some are made at once"
    content = {place: place for place in itertools.product(range(2), range(rows), range(held * ranks))}
    expected = dict(content)
    for stage, row, (first, second) in swaps:
        a, b = (stage, row, first), (stage, row, second)
        expected[a], expected[b] = expected[b], expected[a]
    for trip in trips:
        senders = []
        for stage, row, first, second in trip.up:
            assert (second // held - first // held) % ranks == trip.shift <= ranks / 2
            a, b = (stage, row, first), (stage, row, second)
            content[a], content[b] = content[b], content[a]
            senders += [(stage, first // held, "up")]
            senders += [(stage, second // held, "up" if 2 * trip.shift == ranks else "down")]
        assert len(set(senders)) == len(senders)
        assert trip.sent_experts(ranks) == (1 if 2 * trip.shift == ranks else 2)
    assert content == expected


def test_a_move_has_to_pay_back():
    load = SKEWS["sorted"].tolist()
    all_that_help = plan(load, range(64), 8, None)
    free = plan(load, range(64), 8, Prices(0.0, 1.0, 100))
    assert free.ratio_after <= all_that_help.ratio_after
    assert free.pays
    dear = plan(load, range(64), 8, Prices(1.0, 0.1, 100))
    assert dear.pays
    assert 0 < len(dear.swaps) < len(free.swaps), "swaps that cost more than they bring are left out"
    assert dear.saved_s * 100 > dear.cost_s
    refused = plan(load, range(64), 8, Prices(1.0, 1e-4, 100))
    assert not refused.pays
    assert refused.cost_s > refused.saved_s * 100
    assert not plan(load, range(64), 8, Prices(1.0, 0.0, 100)).pays, "padding: nobody waits for the busiest rank"
