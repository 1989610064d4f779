"""Copies of shards that go unchanged to devices of other nodes: safety copies of the state, and their way back.

D devices of the mesh.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from moe_jax.parallel.host_memory import to_device
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.sharding import REPLICATED

Pairs = Sequence[tuple[int, int]]


def p2p_copy_shards(shardings: Sequence[NamedSharding], pairs: Sequence[Pairs]) -> Wrapped:
    """Return a program that copies shards of arrays: the second device of a pair gets the shard of the first.

    `shardings` and `pairs` have one entry per array. Devices are numbered along the mesh. Those that are second in none
    of an array's pairs get zeros.
    """
    specs = [sharding.spec for sharding in shardings]

    def send(arrays: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("p2p_copy_shards"):
            return [permuted(to_device(x), mesh.axis_names, own) for x, own in zip(arrays, pairs, strict=True)]

    mesh = shardings[0].mesh
    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False))


def checksum_words(mesh: Mesh) -> Wrapped:
    """Return a program that sums integers [D, words] over all devices; each device gets [words]."""

    def add(words: jax.Array) -> jax.Array:
        with jax.named_scope("checksum_words"):
            return jax.lax.psum(words[0], mesh.axis_names)

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=by_device(mesh).spec, out_specs=REPLICATED, check_vma=False))


def by_device(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that has one row per device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
