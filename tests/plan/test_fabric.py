"""Collectives on the links of a cluster: which algorithm, who shares an adapter."""

import dataclasses
import itertools

import pytest

from moe_jax.config import Config, Exchange, Mesh, Model, MoE
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.fabric import Fabric, Group
from moe_jax.plan.step_times import Step

H100 = find_cluster("h100x64")
ETHERNET = dataclasses.replace(H100, ranks_per_adapter=8)  # one adapter in each node
ALL = Group(64, 1)
BY_NODE = ("hier_2d", "halo", "hier_1d")


def seconds_of(algorithm: str, num_bytes: float, cluster: Cluster = H100, group: Group = ALL) -> float:
    found = Fabric(cluster).exchange(num_bytes, group, algorithm)
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
        found = Fabric(cluster).exchange(num_bytes, ALL)
        assert found.algorithm == name
        assert found.seconds == min(seconds_of(each, num_bytes, cluster) for each in ("flat", *BY_NODE))
    assert Fabric(H100).exchange(1e6, Group(8, 1)).algorithm == "flat", "there is one node"


def test_what_is_given_is_timed() -> None:
    """Not the fastest way. Without nodes, or on uneven ones, exchanges by way of nodes are flat, as in training."""
    for group in (ALL, Group(8, 1)):
        for name in ("ragged", "background"):
            assert seconds_of(name, 1e6, group=group) == seconds_of("flat", 1e6, group=group)
        hops = group.ranks - 1
        level = H100.level(group.span)
        # every hop starts a collective
        assert seconds_of("ring", 1e6, group=group) > hops * level.alpha_s > seconds_of("flat", 1e6, group=group) / 2
        assert Fabric(H100).exchange(1e6, group, "ring").algorithm == "ring"
    assert len({seconds_of(name, 1e6) for name in BY_NODE}) == 3
    model, ring = Model(moe=MoE(num_experts=64)), Exchange(algorithm="ring")
    step = Step(Config(mesh=Mesh(data=1, expert=64), model=model, exchange=ring), H100)
    assert step.choice(1e6).seconds == seconds_of("ring", 1e6)
    for name, group in itertools.product(BY_NODE, (Group(8, 1), Group(12, 1), Group(8, 8))):
        assert Fabric(H100).exchange(1e6, group, name) == Fabric(H100).exchange(1e6, group, "flat")


def test_ranks_of_an_adapter_wait_for_each_others_messages() -> None:
    """Their rates are shares of its rate already; a leader has it for itself, in as far as other groups have none."""
    more_s = seconds_of("flat", 1e6, ETHERNET) - seconds_of("flat", 1e6)
    assert more_s == pytest.approx(7 * 56e-6)  # start-ups of seven other ranks' messages
    between = H100.levels[-1]
    leader_s = 7 * 1e9 * between.line.beta_s / 8  # rows of eight ranks for seven nodes, eight times as fast
    assert seconds_of("hier_1d", 1e9) - seconds_of("hier_1d", 1e9, ETHERNET) == pytest.approx(7 * leader_s, rel=1e-3)
    # of eight groups with one rank in each node none has more than its share of the adapter
    alone_s, shared_s = (seconds_of("flat", 1e9, cluster, Group(8, 8)) for cluster in (H100, ETHERNET))
    assert shared_s - alone_s == pytest.approx(7 * 7e-6)


@pytest.mark.parametrize(
    ("name", "sharers"),
    [("h100x64", 1), ("v5p-12288", 1), ("mi250x-64", 2), ("4xv5e-256", 4), ("v6e-512", 2), ("rtx3090x16", 8)],
)
def test_presets_know_who_shares_an_adapter(name: str, sharers: float) -> None:
    assert find_cluster(name).ranks_per_adapter == sharers
