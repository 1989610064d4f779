"""The operations of the microbenchmarks: collectives, matrix products, attention and copies, each as per-device code.

An operation maps an operand to a result that the next run can start from, so runs are chained.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.parallel.all_to_all import BY_NODE, EXCHANGES
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.permute import permuted
from moe_jax.parallel.ranks import Ranks

KINDS = ("collectives", "matmul", "attention", "copy")


class Machine(NamedTuple):
    """The properties of the devices that exchanges depend on."""

    platform: str  # tpu, gpu or cpu
    node_devices: int  # neighbours that fast links connect


class CommGroup(NamedTuple):
    """Groups of devices that communicate, all groups at the same time."""

    ranks: int  # in a group
    stride: int  # between ranks: 1, neighbours; n, every n-th device, and n groups at the same time

    @property
    def axis(self) -> Axis:
        """The mesh axis of the group: neighbours are on the expert axis of a data × expert mesh, other groups on the
        data axis.
        """
        return Axis.EXPERT if self.stride == 1 else Axis.DATA

    def expert(self) -> int:
        """Devices along the mesh's expert axis."""
        return self.ranks if self.stride == 1 else self.stride

    def per_node(self, node_devices: int) -> int:
        """Return the number of ranks of a group that share a node of `node_devices` devices."""
        return math.gcd(self.ranks, max(1, node_devices // self.stride))


class BenchmarkOperation(NamedTuple):
    """One size of one operation."""

    name: str
    settings: tuple[tuple[str, int], ...]
    unit: Literal["bytes", "flops"]
    amount: float
    shape: tuple[int, ...]  # one device's operand
    group: CommGroup | None  # None: each device by itself
    run: Callable[..., jax.Array]  # takes the operand and the weights
    weights: tuple[tuple[int, int], ...] = ()  # shapes, rows × columns


class BenchmarkSizes(NamedTuple):
    """The sizes to measure."""

    num_bytes: Sequence[int]  # for collectives and copies
    tokens: Sequence[int]
    widths: Sequence[int]  # for square matrices
    outputs: Sequence[int]  # columns of tall and skinny ones
    seq_lens: Sequence[int]
    head_dims: Sequence[int]


QUICK = BenchmarkSizes((2**12, 2**15, 2**18), (64, 256), (64, 128), (8,), (64, 128), (32, 64))
ON_CPU = BenchmarkSizes(
    [4**n for n in range(6, 13)], (128, 512, 2048), (256, 1024), (8, 64), (128, 256, 512), (32, 64, 128)
)
ON_ACCELERATOR = BenchmarkSizes(
    [4**n for n in range(6, 15)],
    (128, 512, 2048, 8192),
    (1024, 2048, 4096, 8192),
    (8, 64),
    (512, 1024, 2048, 4096),
    (64, 128, 256),
)


def sizes_for(platform: str, quick: bool) -> BenchmarkSizes:
    """Return the sizes to measure on a platform."""
    return QUICK if quick else ON_CPU if platform == "cpu" else ON_ACCELERATOR


def groups_of(num_devices: int) -> list[CommGroup]:
    """Return groups of neighbours for every size that divides the devices, and the groups across them."""
    divisors = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return [CommGroup(n, 1) for n in divisors] + [CommGroup(num_devices // n, n) for n in divisors if n < num_devices]


def operations(
    kinds: Sequence[str], sizes: BenchmarkSizes, groups: Sequence[CommGroup], machine: Machine, dtype: jnp.dtype
) -> Iterator[BenchmarkOperation]:
    """Yield all operations to measure."""
    if "collectives" in kinds:
        for group in groups:
            for num_bytes in sizes.num_bytes:
                yield from collectives(group, num_bytes, machine, dtype)
    if "matmul" in kinds:
        for tokens in sizes.tokens:
            yield from (_matmul(tokens, width) for width in sizes.widths)
            yield from (_skinny(tokens, sizes.widths[-1], columns) for columns in sizes.outputs)
    if "attention" in kinds:
        yield from (_attention(length, width) for length in sizes.seq_lens for width in sizes.head_dims)
    if "copy" in kinds:
        yield from (_copy(num_bytes, dtype) for num_bytes in sizes.num_bytes)


def collectives(group: CommGroup, num_bytes: int, machine: Machine, dtype: jnp.dtype) -> Iterator[BenchmarkOperation]:
    """Yield the collectives of one size: the bytes of a rank's operand, or of an all-gather's result, rounded up to
    equal parts.

    Hierarchical exchanges are only included if a group has several nodes of several ranks, background exchanges only on
    CPUs.
    """
    part = math.ceil(num_bytes / dtype.itemsize / group.ranks)
    axis, elements = group.axis, part * group.ranks
    amount = elements * dtype.itemsize
    make = partial(
        BenchmarkOperation, settings=tuple(group._asdict().items()), unit="bytes", amount=amount, group=group
    )
    per_node = group.per_node(machine.node_devices)
    for name, exchange in EXCHANGES.items():
        has_nodes = name not in BY_NODE or per_node not in (1, group.ranks)
        has_host = not exchange.only_starts or machine.platform == "cpu"
        if has_nodes and has_host:
            run = partial(exchange.__call__, ranks=Ranks(axis, machine.platform, per_node))
            yield make(f"all_to_all.{name}", shape=(group.ranks, part), run=run)
    to_next = [(rank, (rank + 1) % group.ranks) for rank in range(group.ranks)]
    whole = {
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, axis, tiled=True),
        "all_reduce": lambda x: jax.lax.psum(x, axis),
        "permute": lambda x: permuted(x, axis, to_next),
    }
    for name, collective in whole.items():
        yield make(name, shape=(elements,), run=_with_operand_shape(collective))
    yield make("all_gather", shape=(part,), run=_with_operand_shape(lambda x: jax.lax.all_gather(x, axis, tiled=True)))


def _with_operand_shape(collective: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Wrap a collective to return its operand with one number of the result, since a result of another shape cannot be
    the next operand.
    """

    def run(x: jax.Array) -> jax.Array:
        result = jax.lax.optimization_barrier(collective(x))
        return x.at[0].set(result[0])

    return run


def _matmul(tokens: int, width: int) -> BenchmarkOperation:
    """Return the product tokens × width times width × width."""

    flops = 2.0 * tokens * width * width
    return BenchmarkOperation(
        "matmul", (("width", width),), "flops", flops, (tokens, width), None, jnp.matmul, ((width, width),)
    )


def _skinny(tokens: int, width: int, columns: int) -> BenchmarkOperation:
    """Return the product tokens × width times width × columns, and back: a router's shapes."""

    def run(x: jax.Array, to_narrow: jax.Array, to_wide: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x @ to_narrow) @ to_wide

    settings = (("width", width), ("columns", columns))
    weights = ((width, columns), (columns, width))
    flops = 4.0 * tokens * width * columns
    return BenchmarkOperation("matmul.skinny", settings, "flops", flops, (tokens, width), None, run, weights)


_HEADS = 8


def _attention(length: int, head_dim: int) -> BenchmarkOperation:
    """Return causal attention over one sequence; its FLOPs include masked pairs."""

    def run(x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True)

    flops = 4.0 * length * length * _HEADS * head_dim
    settings = (("head_dim", head_dim), ("heads", _HEADS))
    return BenchmarkOperation("attention", settings, "flops", flops, (1, length, _HEADS, head_dim), None, run)


def _copy(num_bytes: int, dtype: jnp.dtype) -> BenchmarkOperation:
    """Return a negation, which reads and writes each byte once; XLA would remove a plain copy."""
    return BenchmarkOperation("copy", (), "bytes", num_bytes, (num_bytes // dtype.itemsize,), None, jnp.negative)
