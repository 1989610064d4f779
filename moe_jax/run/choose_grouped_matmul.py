"""Choice of the grouped matrix product for `train.grouped_product=auto`, by timing the candidates on a run's devices.

They are timed once for the run's shapes, on platforms where the fastest one is not known in advance. Programs that are
compiled for absent hardware use the platform's default instead.

S is the number of rows, L the number of groups (experts), D and F are the hidden and intermediate widths.
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
from moe_jax.run.timing_cache import TimingCache
from moe_jax.telemetry.run_log import human_seconds

_TIMED = ("gpu",)  # platforms; on others the fastest product is known
_CACHE = TimingCache("grouped_products.json", "grouped products")
Products = Mapping[str, GroupedProduct]


class MatmulShape(NamedTuple):
    """The shape of the grouped product that one device computes for its experts in one microbatch."""

    rows: int  # capacity of the buffer
    filled: int  # rows in each group if the load is even
    groups: int
    width: int
    hidden: int
    dtype: str


Timing = Callable[[MatmulShape, Products], InterleavedTimes]


def with_fastest_product(config: Config, mesh: Mesh, timing: Timing | None = None) -> Config:
    """The config with auto replaced by the fastest product, as measured by process 0. Raises ConfigError."""
    if not is_timed(config, mesh):
        return config
    platform = ComputeConfig.of(config, mesh).platform
    shape, products = shape_of(config, mesh, platform), GROUPED_PRODUCTS[platform]
    fastest = _fastest(shape, products, timing or time_products) if is_main_process() else None
    name = from_process(0, fastest)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, grouped_product=name))


def is_timed(config: Config, mesh: Mesh) -> bool:
    """Whether a run on these devices times the grouped products."""
    compute, moe = ComputeConfig.of(config, mesh), config.model.moe
    is_open = config.train.grouped_product == "auto" and compute.platform in _TIMED
    return bool(is_open and moe.num_experts and moe.sends_sized_rows)


def _fastest(shape: MatmulShape, products: Products, timing: Timing) -> str:
    """The name of the fastest product, from the cache of timings or by timing them; prints the times in one line."""
    environment = {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__, "products": list(products)}
    key = shape._asdict() | environment
    seconds, failed = _CACHE.read(key, products), dict[str, str]()
    if seconds is None:
        seconds, failed = timing(shape, products)
        if seconds:
            _CACHE.write(key, seconds)
    name = min(seconds, key=seconds.__getitem__, default=next(iter(products)))
    times = ", ".join(f"{each} {human_seconds(seconds[each])}" for each in sorted(seconds, key=seconds.__getitem__))
    left_out = "".join(f"; left out: {each} ({reason})" for each, reason in failed.items())
    print(f"train.grouped_product={name}, forward and backward: {times or 'none could be timed'}{left_out}", flush=True)
    return name


def shape_of(config: Config, mesh: Mesh, platform: str) -> MatmulShape:
    """The shape of the grouped product for one microbatch."""
    sizes, model = sizes_of(config, platform, mesh.shape), config.model
    groups = config.expert_slots(mesh.shape) // config.mesh.expert_ranks(mesh.shape)
    received = sizes.tensor / sizes.microbatches  # rows of all tensor ranks arrive, in one microbatch at a time
    return MatmulShape(
        rows=int(sizes.rows.sent * received),
        filled=max(int(sizes.own_tokens * model.moe.top_k * received) // groups, 1),
        groups=groups,
        width=model.hidden_size,
        hidden=model.moe.intermediate_size // mesh.shape[Axis.TENSOR],
        dtype=config.train.compute_dtype,
    )


def time_products(shape: MatmulShape, products: Products) -> InterleavedTimes:
    """Time each product on this process's first device: two products (D → F → D), forward and backward."""
    return time_interleaved({name: partial(_call, shape, product) for name, product in products.items()})


def _call(shape: MatmulShape, product: GroupedProduct) -> Call:
    """A compiled call with its operands: groups of whole tiles, in a buffer for as many rows as a step has."""
    groups, tile = shape.groups, product.tile(shape.rows, shape.groups)
    capacity = -(-(shape.rows + groups * (tile - 1)) // tile) * tile
    size = min(-(-shape.filled // tile) * tile, capacity // groups // tile * tile)

    def gradients(x_SD: jax.Array, in_LDF: jax.Array, out_LFD: jax.Array, size_L: jax.Array) -> Any:
        def there_and_back(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
            return product.multiply(product.multiply(x, w_in, size_L, tile), w_out, size_L, tile)

        y_SD, pull = jax.vjp(there_and_back, x_SD, in_LDF, out_LFD)
        return pull(y_SD)

    shapes = (capacity, shape.width), (groups, shape.width, shape.hidden), (groups, shape.hidden, shape.width)
    with jax.default_device(jax.local_devices()[0]):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        # random numbers, scaled so that products keep their magnitude: zeros would be faster than the numbers of a step
        drawn = [
            jax.random.normal(key, each, shape.dtype) / each[-2] ** 0.5 for key, each in zip(keys, shapes, strict=True)
        ]
        operands = *drawn, jnp.full(groups, size, jnp.int32)
        compiled = jax.jit(gradients).lower(*operands).compile()
    return partial(compiled, *operands)
