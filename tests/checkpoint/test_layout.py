"""Which pieces of the state lie where: on two nodes each, and what is left when some of them are lost."""

from itertools import combinations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.checkpoint.replicas.layout import (
    ReplicaLayout,
    ShardedArray,
    layout_of,
    lost_owners,
    piece_sources,
    replacements,
)
from moe_jax.checkpoint.replicas.plan import index_of
from moe_jax.parallel.p2p_copy import p2p_copy_shards

FOUR_NODES = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3])  # the process of each device, the node of each process
TWO_HOSTS = ([0, 0, 1, 1, 2, 2, 3, 3], [7, 7, 9, 9])
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"))
SPECS = {
    "experts": PartitionSpec("expert"),
    "moments": PartitionSpec(("expert", "data")),
    "whole": PartitionSpec(),
    "data": PartitionSpec("data"),
}
SHAPE = (8, 3)


def cut(name: str) -> ShardedArray:
    slices = NamedSharding(MESH, SPECS[name]).devices_indices_map(SHAPE)
    return ShardedArray(name, 4, [index_of(slices[device], SHAPE) for device in MESH.devices.flat])


def layout(process_D: list[int], node_P: list[int], *names: str) -> ReplicaLayout:
    return layout_of([cut(name) for name in names or SPECS], process_D, node_P)


def held(made: ReplicaLayout, node_P: list[int], lost: set[int]) -> np.ndarray:
    """Which process finds which pieces on its node, when some nodes are lost."""
    count = len(node_P)
    kept = [{each.piece.name for each in (*made.own[p], *made.received(p))} for p in range(count)]
    of_node = {node: set().union(*(kept[p] for p in range(count) if node_P[p] == node)) for node in node_P}
    found = [set() if node in lost else of_node[node] for node in node_P]
    return np.array([[piece.name in names for piece in made.pieces] for names in found])


@pytest.mark.parametrize(("process_D", "node_P"), [FOUR_NODES, TWO_HOSTS])
def test_any_one_node_may_be_lost(process_D: list[int], node_P: list[int]) -> None:
    made = layout(process_D, node_P)
    for node in set(node_P):
        given = piece_sources(held(made, node_P, {node}), made)
        assert lost_owners(given, made) == []
        assert all(node_P[giver] != node for giver in given)


def test_of_two_neighbours_the_first_has_no_copies_left_and_others_may_be_lost_together() -> None:
    made, node_P = layout(*FOUR_NODES, "moments"), FOUR_NODES[1]
    owners = {
        pair: lost_owners(piece_sources(held(made, node_P, {*pair}), made), made) for pair in combinations(node_P, 2)
    }
    assert owners == {(0, 1): [0], (1, 2): [1], (2, 3): [2], (0, 3): [3], (0, 2): [], (1, 3): []}
    experts = layout(*FOUR_NODES, "experts")  # two nodes have them anyway
    assert lost_owners(piece_sources(held(experts, node_P, {0, 2}), experts), experts) == [0, 2]
    assert lost_owners(piece_sources(held(experts, node_P, {0, 1}), experts), experts) == []


def test_what_two_nodes_have_is_not_sent_and_the_rest_is_sent_once() -> None:
    made = layout(*FOUR_NODES)
    assert {each.piece.name.partition("[")[0] for each in made.sent} == {"moments"}, "all else is on two nodes"
    assert len(made.sent) == 8
    alone = layout([0, 0, 0, 0, 1, 1, 1, 1], [0, 1], "experts", "data")
    assert [each.piece.name for each in alone.sent] == ["data[0:4,0:3]", "data[4:8,0:3]"], "once, not of four devices"
    assert layout([0] * 8, [0]).sent == ()


def test_who_lacks_what_gets_it_from_the_next_node() -> None:
    made = layout(*FOUR_NODES)
    there = held(made, FOUR_NODES[1], {2})
    assert replacements(there, piece_sources(there, made), made) == {2: [3]}
    whole = layout(*FOUR_NODES, "whole")
    there = held(whole, FOUR_NODES[1], {0, 2})
    assert replacements(there, piece_sources(there, whole), whole) == {0: [1], 2: [1]}


def test_nodes_that_are_not_alike_are_refused() -> None:
    for process_D, node_P in (([0, 0, 0, 1], [0, 1]), ([0, 1, 2], [5, 5, 6])):
        with pytest.raises(ValueError, match="not alike"):
            layout_of([], process_D, node_P)


@pytest.mark.parametrize("name", SPECS)
def test_pieces_arrive_bit_for_bit_where_they_are_expected(name: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32)
    numbers = bits.view(np.float32)  # NaNs and denormal numbers among them
    made = layout(*FOUR_NODES, name)
    pairs = made.pairs(0) or [(0, 3)]
    sharding = NamedSharding(MESH, SPECS[name])
    (arrived,) = p2p_copy_shards([sharding], [pairs])([jax.device_put(numbers, sharding)])
    of_device = {shard.device: np.asarray(shard.data) for shard in arrived.addressable_shards}
    slices = sharding.devices_indices_map(SHAPE)
    for source, target in pairs:
        sent = numbers[slices[MESH.devices.flat[source]]]
        assert of_device[MESH.devices.flat[target]].tobytes() == sent.tobytes()
