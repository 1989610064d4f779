"""Closed forms of exchanges: against messages counted one by one, conservation, limits."""

import dataclasses
import itertools

import pytest

from moe_jax.plan.exchange import ALGORITHMS, Links, Traffic, exchange_seconds, ring_seconds, steps_of, traffic
from moe_jax.plan.task_times import Linear

FACTORS = [(1, 1), (1, 8), (8, 1), (2, 4), (4, 2), (2, 8), (8, 8), (3, 5)]
H100 = Links(inside=Linear(5e-6, 1 / 450e9), between=Linear(10e-6, 1 / 50e9))
MB = 1e6


def sent(name: str, num_bytes: float, nodes: int, per_node: int, leader: bool = False) -> Traffic:
    return traffic(itertools.chain(*steps_of(name, num_bytes, nodes, per_node)), leader)


@pytest.mark.parametrize(
    ("name", "leader", "inside", "between"),
    [
        ("flat", False, (3, 3.0), (4, 4.0)),
        ("hier_2d", False, (3, 6.0), (1, 4.0)),  # 3 members × 2 nodes' rows; one message of 4 blocks
        ("halo", False, (3 + 3, 3.0 + 3.0), (1, 4.0)),
        ("hier_1d", False, (1, 8.0), (0, 0.0)),
        ("hier_1d", True, (3, 24.0), (1, 16.0)),  # 4 members' rows for 4 members
    ],
)
def test_two_nodes_of_four_ranks_with_a_byte_for_each_rank(name, leader, inside, between):
    assert sent(name, 8.0, 2, 4, leader) == Traffic(inside, between)


@pytest.mark.parametrize("factors", FACTORS)
def test_every_algorithm_brings_the_same_rows_over_the_network(factors):
    """Each block for another node crosses once, by any rank."""
    nodes, per_node = factors
    expected = nodes * per_node * (nodes - 1) * per_node  # blocks of one byte
    for name in ALGORITHMS:
        leader, member = (sent(name, nodes * per_node, nodes, per_node, leader) for leader in (True, False))
        total = nodes * (leader.between.num_bytes + (per_node - 1) * member.between.num_bytes)
        assert total == pytest.approx(expected), name


def test_a_node_sends_fewer_messages_the_more_it_gathers():
    messages = {name: sent(name, 1.0, 8, 8, leader=True).between.messages for name in ALGORITHMS}
    assert messages == {"flat": 56, "hier_2d": 7, "halo": 7, "hier_1d": 7}
    assert sent("hier_1d", 1.0, 8, 8, leader=False).between.messages == 0


@pytest.mark.parametrize("factors", [(1, 1), (1, 8), (8, 1)])
def test_without_nodes_or_without_neighbours_there_is_nothing_to_choose(factors):
    flat = exchange_seconds("flat", MB, *factors, H100)
    for name in ("hier_2d", "halo"):
        assert exchange_seconds(name, MB, *factors, H100) == pytest.approx(flat)


def test_seconds_of_one_case_written_out():
    """64 ranks with 1 MB for all, b = 1/64 MB."""
    b, inside, between = MB / 64, H100.inside.seconds, H100.between.seconds
    seconds = {name: exchange_seconds(name, MB, 8, 8, H100) for name in ALGORITHMS}
    assert seconds["flat"] == pytest.approx(56 * between(b))
    assert seconds["hier_2d"] == pytest.approx(7 * inside(8 * b) + 7 * between(8 * b))
    assert seconds["halo"] == pytest.approx(7 * between(8 * b) + 7 * inside(7 * b))
    assert seconds["hier_1d"] == pytest.approx(2 * 7 * inside(MB) + 7 * between(64 * b))


@pytest.mark.parametrize("sharers", [1, 2, 4])
def test_a_ring_takes_what_its_hops_take_one_by_one(sharers):
    """Each adapter's ranks wait for each other, nodes do not; 3 nodes of 4."""
    links, block = dataclasses.replace(H100, ranks_per_adapter=sharers), MB / 12
    total = 0.0
    for hop in range(1, 12):
        leaving = [rank for rank in range(4) if (rank + hop) % 12 // 4 != 0]
        busiest = max(sum(rank // sharers == adapter for rank in leaving) for adapter in range(4))
        total += max(busiest * links.between.seconds(block), links.inside.seconds(block))
    assert ring_seconds(MB, 3, 4, links) == pytest.approx(total)
    assert ring_seconds(MB, 1, 4, links) == pytest.approx(3 * links.inside.seconds(MB / 4))


def test_halo_is_never_slower_than_hier_2d_where_the_network_is_the_slower_link():
    """It hides the own node's rows behind the others'; with one other node and many ranks start-ups may cost more."""
    for nodes, per_node, num_bytes in itertools.product((8, 16), (2, 4, 8), (1e3, 1e6, 1e9)):
        halo, two = (exchange_seconds(name, num_bytes, nodes, per_node, H100) for name in ("halo", "hier_2d"))
        assert halo <= two * (1 + 1e-9), (nodes, per_node, num_bytes)
    assert exchange_seconds("halo", 1e3, 2, 8, H100) > exchange_seconds("hier_2d", 1e3, 2, 8, H100)
