"""Pieces of arrays that go to devices of other nodes as they are: safety copies, on their way there and back.

D devices of the mesh.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from moe_jax.parallel.sharding import REPLICATED


def send_pieces(sharding: NamedSharding, pairs: Sequence[tuple[int, int]]) -> Wrapped:
    """A program that sends what the first device of each pair holds of an array to the second, as what that holds.

    Devices are numbered along the mesh. What no pair names as second gets zeros.
    """
    mesh, spec = sharding.mesh, sharding.spec

    def send(x: jax.Array) -> jax.Array:
        with jax.named_scope("send_pieces"):
            return jax.lax.ppermute(x, mesh.axis_names, pairs)

    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def sum_words(mesh: Mesh) -> Wrapped:
    """A program that adds up whole numbers [D, words] of all devices; each gets [words]."""

    def add(words: jax.Array) -> jax.Array:
        with jax.named_scope("sum_words"):
            return jax.lax.psum(words[0], mesh.axis_names)

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=by_device(mesh).spec, out_specs=REPLICATED, check_vma=False))


def by_device(mesh: Mesh) -> NamedSharding:
    """Of an array with a row for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
