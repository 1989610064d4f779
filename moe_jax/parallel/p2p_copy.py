"""Pieces of arrays that go to devices of other nodes as they are: safety copies, on their way there and back.

D devices of the mesh.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from moe_jax.parallel.permute import permuted
from moe_jax.parallel.sharding import REPLICATED

Pairs = Sequence[tuple[int, int]]


def p2p_copy_shards(shardings: Sequence[NamedSharding], pairs: Sequence[Pairs]) -> Wrapped:
    """A program that sends pieces of arrays: what the first device of a pair holds becomes what the second one does.

    Devices are numbered along the mesh. Those that are not second in any of an array's pairs get zeros.
    """
    specs = [sharding.spec for sharding in shardings]

    def send(arrays: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("send_pieces"):
            return [permuted(x, mesh.axis_names, of_x) for x, of_x in zip(arrays, pairs, strict=True)]

    mesh = shardings[0].mesh
    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False))


def checksum_words(mesh: Mesh) -> Wrapped:
    """A program that adds up whole numbers [D, words] of all devices; each gets [words]."""

    def add(words: jax.Array) -> jax.Array:
        with jax.named_scope("sum_words"):
            return jax.lax.psum(words[0], mesh.axis_names)

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=by_device(mesh).spec, out_specs=REPLICATED, check_vma=False))


def by_device(mesh: Mesh) -> NamedSharding:
    """Of an array with a row for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
