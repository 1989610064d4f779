"""What `train.grouped_product=auto` is on the devices of a run: timed there once for its shapes, where that matters.

S rows, L groups, D and F widths. Programs for hardware that is not there are never timed: they have a platform's own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.measure.interleaved_timing import Call, InterleavedTimes, time_interleaved
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import Axis
from moe_jax.plan.activation_memory import sizes_of
from moe_jax.run.matmul_timing_cache import read_times, write_times
from moe_jax.telemetry.run_log import human_seconds

_TIMED = ("gpu",)  # platforms; elsewhere it is known which one is the fastest
Products = Mapping[str, GroupedProduct]


class MatmulShape(NamedTuple):
    """Of what one device's experts multiply at a time."""

    rows: int  # that there is room for
    filled: int  # of each group, if all are loaded alike
    groups: int
    width: int
    hidden: int
    dtype: str


Timing = Callable[[MatmulShape, Products], InterleavedTimes]


def with_fastest_product(config: Config, mesh: Mesh, timing: Timing | None = None) -> Config:
    """The config with the fastest product instead of auto, in every process that of process 0. Raises ConfigError."""
    if not is_timed(config, mesh):
        return config
    platform = ComputeConfig.of(config, mesh).platform
    shape, products = shape_of(config, mesh, platform), GROUPED_PRODUCTS[platform]
    own = _fastest(shape, products, timing or time_products) if is_main_process() else None
    name = from_process(0, own)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, grouped_product=name))


def is_timed(config: Config, mesh: Mesh) -> bool:
    """Whether a run on these devices would time its products."""
    compute, moe = ComputeConfig.of(config, mesh), config.model.moe
    is_open = config.train.grouped_product == "auto" and compute.platform in _TIMED
    return bool(is_open and moe.num_experts and moe.sends_sized_rows)


def _fastest(shape: MatmulShape, products: Products, timing: Timing) -> str:
    """The product's name, from what was timed before if anything was; told in a line."""
    here = {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__, "products": list(products)}
    of = shape._asdict() | here
    seconds, failed = read_times(of, products), dict[str, str]()
    if seconds is None:
        seconds, failed = timing(shape, products)
        if seconds:
            write_times(of, seconds)
    name = min(seconds, key=seconds.__getitem__, default=next(iter(products)))
    told = ", ".join(f"{each} {human_seconds(seconds[each])}" for each in sorted(seconds, key=seconds.__getitem__))
    left_out = "".join(f"; left out: {each} ({reason})" for each, reason in failed.items())
    print(f"train.grouped_product={name}, forward and backward: {told or 'none could be timed'}{left_out}", flush=True)
    return name


def shape_of(config: Config, mesh: Mesh, platform: str) -> MatmulShape:
    """Of a microbatch."""
    sizes, model = sizes_of(config, platform, mesh.shape), config.model
    groups = config.expert_slots(mesh.shape) // config.mesh.expert_ranks(mesh.shape)
    received = sizes.tensor / sizes.microbatches  # of what each tensor rank sends for all of them
    return MatmulShape(
        rows=int(sizes.rows.sent * received),
        filled=max(int(sizes.own_tokens * model.moe.top_k * received) // groups, 1),
        groups=groups,
        width=model.hidden_size,
        hidden=model.moe.intermediate_size // mesh.shape[Axis.TENSOR],
        dtype=config.train.compute_dtype,
    )


def time_products(shape: MatmulShape, products: Products) -> InterleavedTimes:
    """Each product forward and backward, to the hidden width and back, on this process's first device."""
    return time_interleaved({name: partial(_call, shape, product) for name, product in products.items()})


def _call(shape: MatmulShape, product: GroupedProduct) -> Call:
    """Compiled, with its operands: groups of whole tiles, and room for as many rows as a step has."""
    groups, tile = shape.groups, product.tile(shape.rows, shape.groups)
    room = -(-(shape.rows + groups * (tile - 1)) // tile) * tile
    size = min(-(-shape.filled // tile) * tile, room // groups // tile * tile)

    def gradients(x_SD: jax.Array, in_LDF: jax.Array, out_LFD: jax.Array, size_L: jax.Array) -> Any:
        def there_and_back(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
            return product.multiply(product.multiply(x, w_in, size_L, tile), w_out, size_L, tile)

        y_SD, pull = jax.vjp(there_and_back, x_SD, in_LDF, out_LFD)
        return pull(y_SD)

    shapes = (room, shape.width), (groups, shape.width, shape.hidden), (groups, shape.hidden, shape.width)
    with jax.default_device(jax.local_devices()[0]):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        # a sum of products keeps its size, and zeros would cost less than a step's numbers
        drawn = [
            jax.random.normal(key, each, shape.dtype) / each[-2] ** 0.5 for key, each in zip(keys, shapes, strict=True)
        ]
        operands = *drawn, jnp.full(groups, size, jnp.int32)
        compiled = jax.jit(gradients).lower(*operands).compile()
    return partial(compiled, *operands)
