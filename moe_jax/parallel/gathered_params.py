"""Parameters that are sharded over the devices that would have the same ones, and gathered where they are used (ZeRO
stage 3: Rajbhandari et al. 2020, section 5; FSDP: Zhao et al. 2023).

A matrix of a block is cast to the compute type before it is gathered, which sends half of the bytes and gives the same
values, since its products cast it anyway. Gradients are summed in float32.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.sharding import Dims, is_matrix, map_dims
from moe_jax.parallel.trees import Gathers, ParamDims, ShardSpecs
from moe_jax.parallel.zero import ShardSpec, all_gather_in_order, ranks_of

_ACTIVATIONS = (("context",), ("tensor",))  # axes of other gathers
_ROUTERS = {"choices", "slots"}  # dimensions of gates' matrices, which compute in float32
_SMALL_BYTES = 2**22  # of a whole array: smaller ones share a gather


@dataclass(frozen=True)
class ParamGather:
    """How one parameter is gathered. Without axes in `shard_spec` every device has the whole parameter."""

    shard_spec: ShardSpec
    dtype: str  # of the gathered array
    platform: str

    def unstacked(self) -> "ParamGather":
        """Return the same for one array of a stack."""
        return replace(self, shard_spec=self.shard_spec.unstacked())

    def gather(self, shard: jax.Array) -> jax.Array:
        """Return the whole array."""
        return self.shard_spec.all_gather(self.cast(shard), self.platform)

    def cast(self, shard: jax.Array) -> jax.Array:
        """Return a shard in the type that is gathered."""
        return shard.astype(self.dtype) if self.shard_spec.axes else shard

    def __call__(self, shard: jax.Array) -> jax.Array:
        """Return the whole array. Its gradient is reduce-scattered over `shard_spec.axes`."""
        return _gather(self, shard) if self.shard_spec.axes else shard


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(own: ParamGather, shard: jax.Array) -> jax.Array:
    return own.gather(shard)


def _gather_forward(own: ParamGather, shard: jax.Array) -> tuple[jax.Array, None]:
    return own.gather(shard), None


def _gather_backward(own: ParamGather, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (own.shard_spec.reduce_scatter(grad.astype(jnp.float32), own.platform),)


_gather.defvjp(_gather_forward, _gather_backward)


def save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: the backward pass gathers parameters again, and recomputes nothing else.

    Parameters that only context ranks, or only tensor ranks, have shards of are saved: their gathers look like those of
    activations.
    """
    return primitive.name != "all_gather" or params["axis_name"] in _ACTIVATIONS


def gathers_of(
    shard_specs: ShardSpecs, dims: ParamDims, compute_dtype: str, platform: str, *, experts_in_float32: bool
) -> Gathers:
    """Return a `ParamGather` for each parameter.

    Matrices of blocks are gathered in the compute type, but not routers. The embedding and the head are gathered in
    float32, in which their gradients are summed over tokens. `experts_in_float32`: products round experts themselves.
    """

    def dtype(dims: Dims) -> str:
        wide = _ROUTERS.intersection(dims) or ("experts" in dims and experts_in_float32)
        return compute_dtype if "layers" in dims and is_matrix(dims) and not wide else "float32"

    dtypes = map_dims(dtype, dims)
    found: Gathers = jax.tree.map(lambda shard_spec, own: ParamGather(shard_spec, own, platform), shard_specs, dtypes)
    return found


def gather_in_order(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Return whole arrays, gathered one after another."""
    casted = [own.cast(shard) for own, shard in zip(gathers, shards, strict=True)]
    return all_gather_in_order([own.shard_spec for own in gathers], casted, gathers[0].platform)


def gathered_together(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> list[tuple[int, ...]]:
    """Return the numbers of the arrays of each gather, without arrays that every device has.

    Small arrays that are sharded over the same axes share a gather, one for each dtype. Runs inside `shard_map`.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, (own, shard) in enumerate(zip(gathers, shards, strict=True)):
        if own.shard_spec.axes:
            whole_bytes = ranks_of(own.shard_spec.axes) * shard.size * jnp.dtype(own.dtype).itemsize
            key = (own.shard_spec.axes, own.dtype) if whole_bytes < _SMALL_BYTES else (number,)
            groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def flat_shards(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> Num[Array, " n"]:
    """Return the shards of arrays that are gathered together, as one vector."""
    return jnp.concatenate([own.cast(shard).ravel() for own, shard in zip(gathers, shards, strict=True)])


def gather_flat(
    gathers: Sequence[ParamGather], flat_n: Num[Array, " n"], shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Return whole arrays, from this device's `flat_shards` of them. `shapes` are those of the shards."""
    return from_flat(gathers, ShardSpec(0, gathers[0].shard_spec.axes).all_gather(flat_n, gathers[0].platform), shapes)


def from_flat(
    gathers: Sequence[ParamGather], rank_n: Num[Array, " n"], shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Return whole arrays, from the `flat_shards` of all ranks, one after another."""
    rank_Pn = rank_n.reshape(ranks_of(gathers[0].shard_spec.axes), -1)
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    parts = jnp.split(rank_Pn, ends[:-1], axis=1)
    return [own.shard_spec.from_ranks(part, shape) for own, part, shape in zip(gathers, parts, shapes, strict=True)]
