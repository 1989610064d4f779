"""The table from dimensions of arrays to mesh axes, and the shardings that follow from it."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.parallel.mesh import BATCH_AXES, Axes, Axis
from moe_jax.parallel.trees import Tree

Dims = tuple[str, ...]

AXES_OF_DIM: dict[str, tuple[Axis, ...]] = {
    "batch": BATCH_AXES,
    "experts": (Axis.EXPERT,),  # and context ranks, if a config says so
    "hidden": (Axis.TENSOR,),
    "heads": (Axis.TENSOR,),
    "kv_heads": (Axis.TENSOR,),
    "layers": (Axis.PIPELINE,),  # the stacked blocks of a segment
    # whole on every device
    "vocab": (),
    "model": (),
    "joined": (),  # an embedding and features, one after the other
    "head": (),
    "latent": (),  # every tensor rank computes the latents of its own tokens
    "router_latent": (),  # a space into which a gate projects tokens
    "choices": (),  # experts as the router's outputs
    "slots": (),  # the slots of each expert
    "channels": (),  # features of all heads that a delta net convolves
    "group_heads": (),  # groups of heads in Mamba-2
    "taps": (),  # tokens of such a convolution
    "one": (),  # a dimension of size 1
}


STACKS = ("layers", "experts")  # dimensions that count arrays
_NO_SPACES = (*STACKS, "taps")


def partition(dims: Dims, experts: Axes = Axis.EXPERT) -> PartitionSpec:
    """Return the PartitionSpec of an array with these dimensions. `experts`: the axes over which experts are sharded.

    Raises ValueError if two dimensions use the same axis.
    """
    table = AXES_OF_DIM | {"experts": experts if isinstance(experts, tuple) else (experts,)}
    if "experts" in dims and Axis.TENSOR in table["experts"]:
        table |= {"hidden": ()}  # each expert is whole on its rank
    axes = [table[dim] for dim in dims]
    used = [axis for group in axes for axis in group]
    if len(used) != len(set(used)):
        raise ValueError(f"dimensions {dims} use a mesh axis twice: {used}")
    return PartitionSpec(*(group if len(group) > 1 else group[0] if group else None for group in axes))


def partitions(dims: Tree, experts: Axes) -> Tree:
    """Return `partition` of each leaf of a tree of dimension tuples."""
    return map_dims(lambda leaf: partition(leaf, experts), dims)


def map_dims(function: Callable[[Dims], Any], dims: Tree) -> Tree:
    """Do the same as `jax.tree.map` for a tree whose leaves are dimension tuples."""
    return jax.tree.map(function, dims, is_leaf=lambda leaf: isinstance(leaf, tuple))


def spaces_of(dims: Dims) -> tuple[tuple[int, ...], ...]:
    """Return the spaces that an array maps between, each as the indices of its dimensions.

    Heads and their width are one space. What counts arrays is none, and neither are the tokens of a convolution, whose
    kernel has a vector for each of them.
    """
    own = [(index, "head" if "head" in name else name) for index, name in enumerate(dims) if name not in _NO_SPACES]
    return tuple(tuple(index for index, _ in same) for _, same in itertools.groupby(own, key=lambda each: each[1]))


def is_matrix(dims: Dims) -> bool:
    """Whether an array maps one space to another."""
    return len(spaces_of(dims)) > 1


def shardings(mesh: Mesh, specs: Tree) -> Tree:
    """Return a NamedSharding for each PartitionSpec of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def sharded_axes(spec: PartitionSpec) -> frozenset[str]:
    """Return the mesh axes over which a spec shards."""
    names: list[str] = []
    for entry in spec:
        names.extend(entry if isinstance(entry, tuple) else [entry] if entry is not None else [])
    return frozenset(names)


def shard_random_init(params: Tree, placed: Tree) -> Tree:
    """Let each device draw a shard of random parameters that are replicated on all devices.

    This is for simulated devices, which share a processor: otherwise each would draw the whole array. Runs inside jit;
    `placed` holds the shardings of the parameters. Values do not depend on which device draws them
    (jax_threefry_partitionable).
    """

    def shard(x: jax.Array, own: NamedSharding) -> jax.Array:
        mesh = own.mesh
        dims = [dim for dim in range(x.ndim) if x.shape[dim] % mesh.size == 0]
        if not own.is_fully_replicated or not dims:
            return x
        largest = max(dims, key=lambda dim: x.shape[dim])
        spec = PartitionSpec(*(mesh.axis_names if dim == largest else None for dim in range(x.ndim)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(shard, params, placed)


BATCH_SPEC = partition(("batch",))
REPLICATED = PartitionSpec()
CACHE_SPEC = PartitionSpec((*BATCH_AXES, Axis.TENSOR))  # every rank has arrays of its own, with its sequences
