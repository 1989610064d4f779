"""Parameters that are sharded over the devices that would have the same ones, and gathered where they are used (ZeRO
stage 3: Rajbhandari et al. 2020, section 5; FSDP: Zhao et al. 2023).

A matrix is cast to the compute type before it is gathered, which sends half of the bytes and gives the same values,
since its products cast it anyway. With `model.moe.expert_matmuls=fp8` a scheduled step gathers experts in 8 bits, to
which their products round them: a rank's part of an expert's matrix has a scale of its own. Gradients are summed in
float32.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from moe_jax.parallel.byte_numbers import PARTS, from_byte_numbers, to_byte_numbers
from moe_jax.parallel.eight_bits import count_bytes, from_bytes, to_bytes
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import Dims, is_matrix, map_dims
from moe_jax.parallel.trees import Gathers, ParamDims, ShardSpecs, Tree
from moe_jax.parallel.zero import ShardSpec, all_gather_in_order, ranks_of

# A plain step gathers a block's parameters also over this axis, which has size 1 there. It changes nothing, but tells
# these gathers from those of activations.
_OF_PARAMETERS = Axis.PIPELINE
_ROUTERS = {"router_latent", "choices", "slots"}  # dimensions of gates' matrices, which compute in float32
_SMALL_BYTES = 2**24  # of a whole array: smaller ones share a gather

_LANES, _TILE_ROWS = 128, 16  # of a tile of 16-bit numbers on TPUs; of wider ones, two

ExpertGather = Literal["compute", "wide", "bytes"]  # the type in which experts are gathered


class _Types(NamedTuple):
    """The types of a gathered array, and of what is sent."""

    whole: str
    sent: str


@dataclass(frozen=True)
class ParamGather:
    """How one parameter is gathered. Without axes in `shard_spec` every device has the whole parameter."""

    shard_spec: ShardSpec
    dtype: str  # of the gathered array
    platform: str
    sent: str  # the type in which it is sent; uint8: rounded to 8 bits, as bytes

    def unstacked(self) -> "ParamGather":
        """Return the same for one array of a stack."""
        return replace(self, shard_spec=self.shard_spec.unstacked())

    def gather(self, shard: jax.Array) -> jax.Array:
        """Return the whole array, in a plain step."""
        return self.restored(self.sent_spec.all_gather(self.cast(shard), self.platform, _OF_PARAMETERS), shard.shape)

    def cast(self, shard: jax.Array) -> jax.Array:
        """Return a shard as it is sent."""
        if not self.shard_spec.axes:
            return shard
        return to_bytes(shard.astype(self.dtype)) if self.as_bytes else shard.astype(self.sent)

    @property
    def as_bytes(self) -> bool:
        """Whether numbers are rounded to 8 bits."""
        return self.sent == "uint8"

    @property
    def sent_spec(self) -> ShardSpec:
        """How the array that is sent is sharded."""
        return ShardSpec(0, self.shard_spec.axes) if self.as_bytes else self.shard_spec

    def restored(self, sent: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the whole array from the gathered one, and the shape of a shard."""
        if not self.shard_spec.axes:
            return sent
        return from_flat([self], sent, [shape])[0] if self.as_bytes else sent.astype(self.dtype)

    def sent_size(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers are sent of a shard of this shape."""
        return count_bytes(shape) if self.as_bytes else math.prod(shape)

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
    """A policy of `jax.checkpoint`: the backward pass gathers parameters again, and recomputes nothing else."""
    return primitive.name != "all_gather" or _OF_PARAMETERS not in params["axis_name"]


def gathers_of(
    shard_specs: ShardSpecs,
    dims: ParamDims,
    compute_dtype: str,
    platform: str,
    *,
    experts: ExpertGather,
    rounds_embedding: bool,
) -> Gathers:
    """Return a `ParamGather` for each parameter.

    Matrices are sent in the compute type, but not routers. The embedding and the head are float32 afterwards, in which
    their gradients are summed over tokens. `experts`: the type of experts, `wide` for float32. `rounds_embedding`: its
    rows are cast to the compute type as they are.
    """

    def types(dims: Dims) -> _Types:
        if not is_matrix(dims) or _ROUTERS.intersection(dims):
            return _Types("float32", "float32")
        if "layers" not in dims:
            is_rounded = rounds_embedding or dims[0] != "vocab"
            return _Types("float32", compute_dtype if is_rounded else "float32")
        if "experts" not in dims or experts == "compute":
            return _Types(compute_dtype, compute_dtype)
        return _Types("float32", "float32") if experts == "wide" else _Types(compute_dtype, "uint8")

    found: Gathers = jax.tree.map(
        lambda shard_spec, own: ParamGather(shard_spec, own.whole, platform, own.sent),
        shard_specs,
        map_dims(types, dims),
        is_leaf=lambda leaf: isinstance(leaf, ShardSpec),
    )
    return found


def cast_for_products(gathers: Tree, weights: Tree) -> Tree:
    """Return the whole weights of a block in the types in which products read them.

    On TPUs each matrix is cast once: XLA would cast it inside every product, again for each tile that reads it.
    """

    def cast(own: ParamGather, leaf: jax.Array) -> jax.Array:
        if own.platform != "tpu" or leaf.dtype == own.dtype:
            return leaf.astype(own.dtype)
        # as bits: in a loop over blocks, XLA would cast those of all blocks before the loop
        bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(leaf, jnp.uint32))
        return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(bits, leaf.dtype).astype(own.dtype))

    return jax.tree.map(cast, gathers, weights)


def gather_in_order(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Return whole arrays, gathered one after another."""
    sent = [own.cast(shard) for own, shard in zip(gathers, shards, strict=True)]
    whole = all_gather_in_order([own.sent_spec for own in gathers], sent, gathers[0].platform)
    return [own.restored(x, shard.shape) for own, x, shard in zip(gathers, whole, shards, strict=True)]


def gathered_together(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> list[tuple[int, ...]]:
    """Return the numbers of the arrays of each gather, without arrays that every device has.

    Small arrays that are sharded over the same axes share a gather, float32 and one narrower type together. Runs inside
    `shard_map`.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, (own, shard) in enumerate(zip(gathers, shards, strict=True)):
        if own.shard_spec.axes:
            whole_bytes = ranks_of(own.shard_spec.axes) * shard.size * jnp.dtype(own.sent).itemsize
            key = (own.shard_spec.axes, own.as_bytes) if whole_bytes < _SMALL_BYTES else (number,)
            groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def flat_shards(gathers: Sequence[ParamGather], shards: Sequence[jax.Array]) -> Num[Array, " n"]:
    """Return the shards of arrays that are gathered together, as one vector of the narrowest type."""
    sent, narrow = [own.cast(shard).ravel() for own, shard in zip(gathers, shards, strict=True)], _narrowest(gathers)
    parts = [x if x.dtype == narrow else to_byte_numbers(x, narrow) for x in sent]
    return jnp.concatenate([jnp.pad(x, (0, -len(x) % _aligned_to(gathers))) for x in parts])


def gather_flat(gathers: Sequence[ParamGather], flat_n: Num[Array, " n"]) -> Num[Array, "..."]:
    """Return the `flat_shards` of all ranks, from this device's, for `from_flat`."""
    rows_rc = flat_n.reshape(-1, _LANES) if _aligned_to(gathers) > 1 else flat_n
    return ShardSpec(0, gathers[0].shard_spec.axes).all_gather(rows_rc, gathers[0].platform)


def from_flat(
    gathers: Sequence[ParamGather], rank_n: Num[Array, "..."], shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Return whole arrays, from the `flat_shards` of all ranks, one after another, as a vector or in rows. `shapes` are
    those of the shards.
    """
    ranks, narrow, aligned = ranks_of(gathers[0].shard_spec.axes), _narrowest(gathers), _aligned_to(gathers)
    lanes = _LANES if aligned > 1 else 1
    rank_Prc = rank_n.reshape(ranks, -1, lanes)
    parts_of = [1 if own.sent == narrow else PARTS for own in gathers]
    sizes = [each * own.sent_size(shape) for each, own, shape in zip(parts_of, gathers, shapes, strict=True)]
    rows = [-(-size // aligned) * aligned // lanes for size in sizes]
    whole = []
    split = jnp.split(rank_Prc, list(itertools.accumulate(rows))[:-1], axis=1)
    for own, part_Prc, size, shape in zip(gathers, split, sizes, shapes, strict=True):
        part_Pn = part_Prc.reshape(ranks, -1)[:, :size]
        sent_Pn = part_Pn if own.sent == narrow else from_byte_numbers(part_Pn)
        whole_Pm = from_bytes(sent_Pn, shape, own.dtype) if own.as_bytes else sent_Pn.astype(own.dtype)
        whole.append(own.shard_spec.from_ranks(whole_Pm, shape))
    return whole


def _aligned_to(gathers: Sequence[ParamGather]) -> int:
    """Return a divisor of the length of each array in a shared gather: on TPUs whole tiles, which are cut fast."""
    return _LANES * _TILE_ROWS if gathers[0].platform == "tpu" and len(gathers) > 1 else 1


def _narrowest(gathers: Sequence[ParamGather]) -> str:
    return min((own.sent for own in gathers), key=lambda dtype: jnp.dtype(dtype).itemsize)
