"""Collectives over several mesh axes as one, in every order of these axes, against their definition.

Payloads name the device that sends them. D devices in the order of the mesh, G groups of P ranks each, rank r of a
group being the r-th in the order of the axes that the collective was given.
"""

import collections
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import MeshConfig
from moe_jax.parallel import background
from moe_jax.parallel.all_to_all import EXCHANGES, ragged
from moe_jax.parallel.all_to_all.ragged import Widths
from moe_jax.parallel.expert_transfer import all_reduce_replicated_experts, encode, migrate
from moe_jax.parallel.mesh import ALL_AXES, Axis, make_mesh
from moe_jax.parallel.p2p_transport import MessageTag, P2PTransport
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.reductions import REDUCTIONS, SCATTERS, scatter_of
from moe_jax.parallel.tensor_dispatch import FORMS, DispatchRoute
from moe_jax.parallel.zero import ShardSpec

LENGTH = 5  # of what is summed: no multiple of the ranks
HELD = 2  # experts of a rank
SWAPS = {1: (0, HELD + 1), 2: (HELD, 3 * HELD)}  # so many ranks apart, slots change places
EXCHANGED = [
    *((name, "cpu", 1 if name in ("flat", "ring", "background") else 2) for name in EXCHANGES),
    ("halo", "tpu", 2),
]

PAIRS = [
    *({first: 2, second: 2} for first, second in itertools.combinations(Axis, 2)),
    {Axis.CONTEXT: 2, Axis.EXPERT: 4},
]


def mesh_of(sizes: dict[Axis, int]) -> jax.sharding.Mesh:
    plain = MeshConfig(**({axis.value: 1 for axis in Axis} | {axis.value: size for axis, size in sizes.items()}))
    mesh = make_mesh(plain, jax.devices()[: math.prod(sizes.values())])
    background.connect(mesh)
    return mesh


def on_each_device(body: Any, mesh: jax.sharding.Mesh) -> dict[str, np.ndarray]:
    """What `body(device)` makes on every device, [D, …]."""
    spec = PartitionSpec(ALL_AXES)

    def numbered(device_1: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], body(device_1[0]))

    program = jax.jit(jax.shard_map(numbered, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return jax.tree.map(np.asarray, program(jnp.arange(mesh.size, dtype=jnp.int32)))


def in_groups(x_D: np.ndarray, mesh: jax.sharding.Mesh, axes: tuple[Axis, ...]) -> np.ndarray:
    """[D, …] → [G, P, …]"""
    whole = x_D.reshape(*mesh.shape.values(), *x_D.shape[1:])
    places = [mesh.axis_names.index(axis) for axis in axes]
    last = range(len(mesh.shape) - len(axes), len(mesh.shape))
    return np.moveaxis(whole, places, last).reshape(-1, math.prod(mesh.shape[axis] for axis in axes), *x_D.shape[1:])


def sums(device: jax.Array, axes: tuple[Axis, ...], ranks: int) -> dict[str, Any]:
    """Sums of whole numbers, so that they are exact."""
    x_n, x_Pm = (device + 1) ** 2 + jnp.arange(LENGTH), (device + 1) ** 2 + jnp.arange(3 * ranks).reshape(ranks, 3)
    made = {f"sum {name}": reduction(x_n, axes) for name, reduction in REDUCTIONS.items()}
    made |= {f"scatter {name}": scatter(x_Pm, axes) for name, scatter in SCATTERS.items()}
    shard_spec, x = ShardSpec(1, axes), (device + 1) ** 2 + jnp.arange(6 * ranks).reshape(3, 2 * ranks)
    made |= {f"part of the sum, {platform}": shard_spec.reduce_scatter(x, platform) for platform in ("cpu", "tpu")}
    return made | {
        "scatter tpu": scatter_of("all_reduce", "tpu")(x_Pm, axes),
        "own part": shard_spec.local_shard(x),
        "whole": shard_spec.all_gather(shard_spec.local_shard(jnp.arange(6 * ranks).reshape(3, 2 * ranks)), "cpu"),
    }


def check_sums(made: dict[str, np.ndarray], device_GP: np.ndarray) -> None:
    ranks = device_GP.shape[1]
    square_GP1 = (device_GP[..., None] + 1) ** 2
    for name in REDUCTIONS:
        total = (square_GP1 + np.arange(LENGTH)).sum(1, keepdims=True)
        np.testing.assert_array_equal(made[f"sum {name}"], np.broadcast_to(total, (*device_GP.shape, LENGTH)), name)
    row_GPm = (square_GP1[..., None] + np.arange(3 * ranks).reshape(ranks, 3)).sum(1)  # of rank P
    for name in (*SCATTERS, "tpu"):
        np.testing.assert_array_equal(made[f"scatter {name}"], row_GPm, name)
    x = np.arange(6 * ranks).reshape(3, 2 * ranks)
    part_P = np.stack(np.split(x, ranks, axis=1))
    for platform in ("cpu", "tpu"):
        total = ranks * part_P + square_GP1.sum(1)[..., None, None]
        np.testing.assert_array_equal(made[f"part of the sum, {platform}"], total)
    np.testing.assert_array_equal(made["own part"], part_P + square_GP1[..., None])
    np.testing.assert_array_equal(made["whole"], np.broadcast_to(x, (*device_GP.shape, *x.shape)))


def exchanges(device: jax.Array, axes: tuple[Axis, ...], ranks: int) -> dict[str, Any]:
    """What arrives, and the gradient of its product with the receiver's number."""
    sent_P1 = 100.0 * device + jnp.arange(ranks, dtype=jnp.float32)[:, None]

    def exchanged(name: str, platform: str, per_node: int) -> Any:
        exchange = EXCHANGES[name].bind(Ranks(axes, platform, per_node))
        received, pull = jax.vjp(exchange, sent_P1)
        return received, pull((device + 1.0) * jnp.ones_like(sent_P1))[0]

    return {str(which): exchanged(*which) for which in EXCHANGED}


def check_exchanges(made: dict[str, Any], device_GP: np.ndarray) -> None:
    ranks = device_GP.shape[1]
    sent_GPP = 100.0 * device_GP[..., None] + np.arange(ranks)
    for which in EXCHANGED:
        received, gradient = made[str(which)]
        np.testing.assert_array_equal(received[..., 0], sent_GPP.swapaxes(1, 2), str(which))
        of_receiver = np.broadcast_to(device_GP[:, None, :] + 1.0, sent_GPP.shape)
        np.testing.assert_array_equal(gradient[..., 0], of_receiver, str(which))


def others(device: jax.Array, axes: tuple[Axis, ...], ranks: int) -> dict[str, Any]:
    """Permutes, rows with their sizes, and experts that move or have copies."""
    backwards = [(rank, ranks - 1 - rank) for rank in range(ranks - 1)]  # no rank sends to rank 0
    count_E = device + 1 + jnp.arange(ranks)
    one_PE = jnp.ones((ranks, ranks), jnp.int32)
    rows_S1 = 100.0 * device + jnp.arange(ranks, dtype=jnp.float32)[:, None]
    lanes = ragged.to_lanes(rows_S1, one_PE, Widths(ranks, 0), axes, "cpu")
    expert_11L1 = (10.0 * device + jnp.arange(HELD)).reshape(1, HELD, 1)
    pipeline = jax.lax.axis_size(Axis.PIPELINE)
    swaps = [[(stage, 0, *SWAPS[shift], True, True) for stage in range(pipeline)] for shift in SWAPS]
    trips = jax.tree.map(jnp.asarray, encode(list(zip(SWAPS, swaps, strict=True)), len(SWAPS), pipeline, ranks, HELD))
    # of another type, as bfloat16 moments are
    migrated, moments = migrate([expert_11L1, expert_11L1.astype(jnp.bfloat16)], trips, axes)
    assert moments.dtype == jnp.bfloat16
    return {
        "permuted": permuted(device + 1, axes, backwards),
        "rank": jax.lax.axis_index(axes),
        "sizes": ragged.gather_sizes(count_E, axes),
        "lane": lanes[0],
        "rows": ragged.from_lanes(*lanes, one_PE, ranks, axes, "cpu"),
        "migrated": migrated,
        "moments migrated": moments.astype(jnp.float32),
        "copies": all_reduce_replicated_experts([expert_11L1], copied(ranks), HELD * ranks - 1, axes, "cpu", [])[0],
    }


def copied(ranks: int) -> jax.Array:
    """The experts of all slots: one of the first rank's has a copy on the last."""
    return jnp.array([[*range(HELD * ranks - 1), 0]], jnp.int32)


def check_others(made: dict[str, np.ndarray], device_GP: np.ndarray) -> None:
    ranks = device_GP.shape[1]
    turned_GP = device_GP[:, ::-1] + 1
    turned_GP[:, 0] = 0
    np.testing.assert_array_equal(made["permuted"], turned_GP)
    np.testing.assert_array_equal(made["rank"], np.broadcast_to(np.arange(ranks), device_GP.shape))
    count_GPE = device_GP[..., None] + 1 + np.arange(ranks)
    np.testing.assert_array_equal(made["sizes"], np.broadcast_to(count_GPE[:, None], made["sizes"].shape))
    sent_GPE = 100.0 * device_GP[..., None] + np.arange(ranks)
    np.testing.assert_array_equal(made["lane"][:, :, 0, :, 0], sent_GPE.swapaxes(1, 2))
    np.testing.assert_array_equal(made["rows"][..., 0], sent_GPE)
    slot_GS = (10.0 * device_GP[..., None] + np.arange(HELD)).reshape(len(device_GP), -1)
    moved_GS = slot_GS.copy()
    for first, second in SWAPS.values():
        moved_GS[:, [first, second]] = moved_GS[:, [second, first]]
    for name in ("migrated", "moments migrated"):
        np.testing.assert_array_equal(made[name].reshape(slot_GS.shape), moved_GS)
    summed_GS = slot_GS.copy()
    summed_GS[:, 0] = summed_GS[:, -1] = slot_GS[:, 0] + slot_GS[:, -1]
    np.testing.assert_array_equal(made["copies"].reshape(slot_GS.shape), summed_GS)


def check(sizes: dict[Axis, int], orders: list[tuple[Axis, ...]], kinds: list[Any]) -> None:
    """Each kind of collectives over each of these tuples of axes, all in one program."""
    mesh = mesh_of(sizes)

    def body(device: jax.Array) -> Any:
        return [[make(device, axes, math.prod(sizes[axis] for axis in axes)) for make, _ in kinds] for axes in orders]

    made = on_each_device(body, mesh)
    for axes, of_axes in zip(orders, made, strict=True):
        group = functools.partial(in_groups, mesh=mesh, axes=axes)
        for (_, check_kind), of_kind in zip(kinds, of_axes, strict=True):
            check_kind(jax.tree.map(group, of_kind), group(np.arange(mesh.size)))


KINDS = [(sums, check_sums), (exchanges, check_exchanges), (others, check_others)]


@pytest.mark.parametrize("sizes", PAIRS, ids=lambda sizes: " × ".join(f"{axis}={sizes[axis]}" for axis in sizes))
def test_collectives_over_two_axes_in_either_order_are_what_they_say(sizes):
    check(sizes, list(itertools.permutations(sizes)), KINDS)


THREE = {Axis.DATA: 2, Axis.CONTEXT: 2, Axis.EXPERT: 2}


def test_sums_over_three_axes_in_any_order_are_what_they_say():
    sizes = {Axis.DATA: 2, Axis.EXPERT: 2, Axis.TENSOR: 2}
    check(sizes, list(itertools.permutations(sizes)), KINDS[:1])


def test_a_sum_in_the_background_sends_each_number_to_another_node_once(monkeypatch):
    """Of the 16 numbers, a device sends 8 to its neighbour in each of two rounds, and 8 to other nodes in all."""
    mesh, sent = mesh_of({Axis.EXPERT: 2, Axis.TENSOR: 2}), collections.Counter()
    send = P2PTransport.send

    def counted(transport: P2PTransport, key: MessageTag, x: np.ndarray) -> None:
        sent[key.source, "neighbour" if key.source // 2 == key.target // 2 else "other node"] += x.size
        send(transport, key, x)

    monkeypatch.setattr(P2PTransport, "send", counted)
    axes = (Axis.EXPERT, Axis.TENSOR)
    total = on_each_device(lambda device: REDUCTIONS["background"](device + jnp.arange(16), axes), mesh)
    np.testing.assert_array_equal(total, np.broadcast_to(6 + 4 * np.arange(16), (4, 16)))
    assert sent == {
        (device, where): count for device in range(4) for where, count in (("neighbour", 16), ("other node", 8))
    }


def test_collectives_over_two_axes_with_another_one_between_them_are_what_they_say():
    check(THREE, list(itertools.permutations((Axis.DATA, Axis.EXPERT))), KINDS)


def test_rows_for_experts_over_two_axes_reach_all_their_tensor_ranks_and_come_back_summed():
    mesh = mesh_of({Axis.CONTEXT: 2, Axis.EXPERT: 2, Axis.TENSOR: 2})
    orders = list(itertools.permutations((Axis.CONTEXT, Axis.EXPERT)))

    def carried(x: jax.Array, form: str, axes: tuple[Axis, ...], *, to_experts: bool) -> jax.Array:
        ranks = Ranks(axes, "cpu")
        return DispatchRoute("ring", ranks, form, 2).all_to_all(x, EXCHANGES["ring"].bind(ranks), to_experts=to_experts)

    def body(device: jax.Array) -> Any:
        sent = jnp.broadcast_to(100.0 * device + jnp.arange(4.0)[:, None, None], (4, 3, 1))
        there = {(form, axes): carried(sent, form, axes, to_experts=True) for form in FORMS for axes in orders}
        back = {key: carried(x, *key, to_experts=False) for key, x in there.items()}
        return {str(key): (there[key], back[key]) for key in there}

    made = on_each_device(body, mesh)
    for form, axes in itertools.product(FORMS, orders):
        device_PT = in_groups(np.arange(8), mesh, (*axes, Axis.TENSOR)).reshape(4, 2)
        there, back = (
            in_groups(x, mesh, (*axes, Axis.TENSOR))[0].reshape(4, 2, -1, 3) for x in made[str((form, axes))]
        )
        sent = 100.0 * device_PT.T.ravel() + np.arange(4)[:, None]  # to rank P from all sources
        np.testing.assert_array_equal(there, np.broadcast_to(sent[:, None, :, None], there.shape), form)
        returned = 2 * (100.0 * device_PT[..., None, None] + np.arange(4)[:, None])
        np.testing.assert_array_equal(back, np.broadcast_to(returned, back.shape), form)
