"""Collectives on the links of a cluster: which algorithm, who shares an adapter, and what was measured."""

import dataclasses
import itertools

import pytest

from moe_jax.config import Config, ExchangeConfig, MeshConfig, ModelConfig, MoEConfig
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.curves import Curve, curve
from moe_jax.plan.step_times import Step

H100 = find_cluster("h100x64")
ETHERNET = dataclasses.replace(H100, ranks_per_adapter=8)  # one adapter in each node
ALL = DeviceGroup(64, 1)
BY_NODE = ("hier_2d", "halo", "hier_1d")


def seconds_of(algorithm: str, num_bytes: float, cluster: Cluster = H100, group: DeviceGroup = ALL) -> float:
    found = CollectiveCosts(cluster).exchange(num_bytes, group, algorithm)
    assert found.algorithm in (algorithm, "flat")
    return found.seconds


def test_the_choice_is_the_least_and_follows_what_is_scarce() -> None:
    chosen = {
        (H100, 1e6): "halo",  # start-ups between nodes
        (H100, 1e9): "flat",  # only bytes count, and each crosses the network anyway
        (ETHERNET, 1e5): "hier_1d",  # start-ups, at an adapter that a node has once
        (ETHERNET, 1e8): "halo",  # a leader's links inside the node would be the bottleneck
    }
    for (cluster, num_bytes), name in chosen.items():
        found = CollectiveCosts(cluster).exchange(num_bytes, ALL)
        assert found.algorithm == name
        assert found.seconds == min(seconds_of(each, num_bytes, cluster) for each in ("flat", *BY_NODE))
    assert CollectiveCosts(H100).exchange(1e6, DeviceGroup(8, 1)).algorithm == "flat", "there is one node"


def test_which_exchanges_have_other_links_than_sums() -> None:
    """Of GPUs in several nodes, if all of a group are in one."""
    inside = CollectiveCosts(H100).stay_inside_nodes
    assert all(inside(group) for group in (DeviceGroup(8, 1), DeviceGroup(2, 4)))
    assert not any(inside(group) for group in (ALL, DeviceGroup(8, 8), DeviceGroup(1, 1)))
    assert not CollectiveCosts(find_cluster("h100x8")).stay_inside_nodes(DeviceGroup(8, 1))
    assert not CollectiveCosts(find_cluster("2xv5p-32")).stay_inside_nodes(DeviceGroup(8, 1))


def test_what_is_given_is_timed() -> None:
    """Not the fastest way. Without nodes, or on uneven ones, exchanges by way of nodes are flat, as in training."""
    for group in (ALL, DeviceGroup(8, 1)):
        for name in ("ragged", "background"):
            assert seconds_of(name, 1e6, group=group) == seconds_of("flat", 1e6, group=group)
        hops = group.ranks - 1
        level = H100.level(group.span)
        # every hop starts a collective
        assert (
            seconds_of("ring", 1e6, group=group)
            > hops * level.exchange_line.alpha_s
            > seconds_of("flat", 1e6, group=group) / 2
        )
        assert CollectiveCosts(H100).exchange(1e6, group, "ring").algorithm == "ring"
    assert len({seconds_of(name, 1e6) for name in BY_NODE}) == 3
    model, ring = ModelConfig(moe=MoEConfig(num_experts=64)), ExchangeConfig(algorithm="ring")
    step = Step(Config(mesh=MeshConfig(data=1, expert=64), model=model, exchange=ring), H100)
    assert step.exchanges.choice(1e6).seconds == seconds_of("ring", 1e6)
    for name, group in itertools.product(BY_NODE, (DeviceGroup(8, 1), DeviceGroup(12, 1), DeviceGroup(8, 8))):
        assert CollectiveCosts(H100).exchange(1e6, group, name) == CollectiveCosts(H100).exchange(1e6, group, "flat")


def test_ranks_of_an_adapter_wait_for_each_others_messages() -> None:
    """Their rates are shares of its rate already; a leader has it for itself, in as far as other groups have none."""
    more_s = seconds_of("flat", 1e6, ETHERNET) - seconds_of("flat", 1e6)
    between = H100.level(64)
    assert more_s == pytest.approx(7 * 56 * between.message_s)  # of seven other ranks
    leader_s = 7 * 1e9 * between.exchange_line.beta_s / 8  # rows of eight ranks for seven nodes, eight times as fast
    assert seconds_of("hier_1d", 1e9) - seconds_of("hier_1d", 1e9, ETHERNET) == pytest.approx(7 * leader_s, rel=1e-3)
    # of eight groups with one rank in each node none has more than its share of the adapter
    alone_s, shared_s = (seconds_of("flat", 1e9, cluster, DeviceGroup(8, 8)) for cluster in (H100, ETHERNET))
    assert shared_s - alone_s == pytest.approx(7 * 7 * between.message_s)


@pytest.mark.parametrize(
    ("name", "sharers"),
    [("h100x64", 1), ("v5p-12288", 1), ("mi250x-64", 2), ("4xv5e-256", 4), ("v6e-512", 2), ("rtx3090x16", 8)],
)
def test_presets_know_who_shares_an_adapter(name: str, sharers: float) -> None:
    assert find_cluster(name).ranks_per_adapter == sharers


def line(name: str, ranks: int, stride: int, *points: tuple[float, float]) -> Curve:
    """Through (bytes, seconds)."""
    num_bytes, seconds = zip(*points, strict=True)
    settings = {"ranks": ranks, "stride": stride}
    return curve(name, settings, "bytes", num_bytes, [(each, each, each) for each in seconds])


def measured(node_devices: int, *curves: Curve) -> Cluster:
    levels = [dataclasses.replace(H100.levels[0], devices=node_devices), dataclasses.replace(H100.levels[1], devices=8)]
    return dataclasses.replace(H100, devices=8, levels=tuple(levels), curves=curves)


@pytest.mark.parametrize("node_devices", [1, 2, 8])
def test_the_planner_predicts_what_was_measured_over_a_group(node_devices: int) -> None:
    """Whether it is inside a node or not; no curve of it is a line from zero."""
    points = ((1e6, 9e-3), (1e8, 50e-3))
    names = ("all_to_all.flat", "all_to_all.ring", "all_gather", "reduce_scatter", "all_reduce", "permute")
    others = [line(name, 2, 4, (1e6, 1.0), (1e8, 2.0)) for name in names]
    costs, group = (
        CollectiveCosts(measured(node_devices, *others, *(line(name, 4, 1, *points) for name in names))),
        DeviceGroup(4, 1),
    )
    for num_bytes, seconds in points:
        for algorithm in ("auto", "flat", "ring", "ragged", "background"):
            assert costs.exchange(num_bytes, group, algorithm).seconds == pytest.approx(seconds)
        assert costs.ring(num_bytes * 3 / 4, group) == pytest.approx(seconds)  # leave each rank
        assert costs.ring(num_bytes * 3 / 4, group, "reduce_scatter") == pytest.approx(seconds)
        assert costs.ring(2 * num_bytes * 3 / 4, group, "all_reduce") == pytest.approx(seconds)
        assert costs.ring(3 * num_bytes, group, "permute") == pytest.approx(3 * seconds)
        assert costs.send(num_bytes, group) == pytest.approx(seconds)


def test_of_algorithms_that_were_measured_the_fastest_is_chosen() -> None:
    """Closed forms stand for those that were not, if they are asked for."""
    flat = line("all_to_all.flat", 8, 1, (1e3, 1e-3), (1e6, 2e-3))
    halo = line("all_to_all.halo", 8, 1, (1e3, 2e-3), (1e6, 1e-3))
    only_flat, both = CollectiveCosts(measured(4, flat)), CollectiveCosts(measured(4, flat, halo))
    group = DeviceGroup(8, 1)
    assert [both.exchange(num_bytes, group).algorithm for num_bytes in (1e3, 1e6)] == ["flat", "halo"]
    assert only_flat.exchange(1e6, group).seconds == pytest.approx(2e-3)
    assert only_flat.exchange(1e6, group, "halo") == CollectiveCosts(measured(4)).exchange(1e6, group, "halo")
    assert only_flat.exchange(1e6, DeviceGroup(4, 1)) == CollectiveCosts(measured(4)).exchange(
        1e6, DeviceGroup(4, 1)
    ), "the node's links"


def test_other_groups_take_as_long_for_as_many_bytes_over_the_same_links() -> None:
    curves = [line(name, 4, 2, (1e6, 1e-3), (1e9, 1.0)) for name in ("all_to_all.flat", "all_gather")]
    costs = CollectiveCosts(measured(4, *curves))  # two of them in each of two nodes
    # half of all rows leave a node, and three quarters; of what all want alike each rank sends its part
    assert costs.exchange(1e7, DeviceGroup(4, 2)).seconds == pytest.approx(1e-2)
    assert costs.exchange(1e7, DeviceGroup(4, 4)).seconds == pytest.approx(1.5e-2)
    assert costs.ring(7.5e6, DeviceGroup(4, 2)) == pytest.approx(1e-2)
    assert costs.ring(7.5e6, DeviceGroup(4, 4)) == pytest.approx(3e-2)
    scattered = DeviceGroup(4, 2, rows=2, row_stride=4)  # stages between the rows: two in each node, too
    assert costs.exchange(1e7, scattered).seconds == pytest.approx(1e-2)


def test_hierarchies_win_where_messages_are_many_and_small() -> None:
    """As Piper found for HALO on 64 dies of Frontier; long messages are best sent directly."""
    costs = CollectiveCosts(find_cluster("mi250x-64"))
    assert costs.exchange(1e6, DeviceGroup(64, 1)).algorithm == "halo"
    assert costs.exchange(1e9, DeviceGroup(64, 1)).algorithm == "flat"


def test_every_part_of_a_ring_passes_through_every_node() -> None:
    """Over two nodes of eight, 15/16 of all bytes cross eight adapters, not the half of another node."""
    cluster = find_cluster("h100x16")
    between = cluster.level(16)
    beta_s = 1 / (8 * between.bytes_per_s * between.ring.efficiency)
    found = CollectiveCosts(cluster).ring(15e9, DeviceGroup(16, 1))
    assert found - between.line.alpha_s == pytest.approx(15e9 * beta_s, rel=0.1)


def test_a_background_sum_is_passed_on_inside_of_nodes() -> None:
    """The scatter and the gather send all but the own part of the numbers, once each: of 2 · 63/64 of them."""
    costs, inside = CollectiveCosts(H100), H100.levels[0].line
    sent_bytes, passed_on_bytes = 2 * 63 / 64 * 1e9, 2 * 7 / 8 * 1e9
    assert costs.passed_on_s(sent_bytes, ALL) == pytest.approx(2 * inside.alpha_s + inside.beta_s * passed_on_bytes)
    assert costs.passed_on_s(1e9, DeviceGroup(8, 1)) == costs.passed_on_s(1e9, DeviceGroup(8, 8)) == 0
