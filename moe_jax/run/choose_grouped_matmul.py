"""Choice of the grouped matrix product for `train.grouped_product=auto`, by timing the candidates on a run's devices.

They are timed once for the run's shapes, on platforms where the fastest one is not known in advance. Programs that are
compiled for absent hardware use the platform's default instead. Each pass is timed by itself: forward, the gradient of
the rows (dgrad) and that of the weights (wgrad). Kernels of different products can be put together if groups are padded
to the same tile.

S is the number of rows, L the number of groups (experts), D and F are the hidden and intermediate widths.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Compiled

from moe_jax.checkpoint.files import steps_of
from moe_jax.checkpoint.record import read_record
from moe_jax.checkpoint.storage import storage_of
from moe_jax.config import Config
from moe_jax.config.grouped_products import AUTO, PassKernels, passes_of
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import CheckpointError
from moe_jax.measure.interleaved_timing import Call, InterleavedTimes, time_interleaved
from moe_jax.models.grouped_matmul import blocks, blocks_dgrad, blocks_wgrad
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct, Pass, available
from moe_jax.models.transformer import ComputeConfig, capability_of
from moe_jax.plan.device_sizes import sizes_of
from moe_jax.run.timing_cache import TimingCache
from moe_jax.telemetry.run_log import human_seconds

_TIMED = ("gpu", "tpu")  # platforms; on others the fastest product is known
_PASSES = PassKernels._fields
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


def with_fastest_product(
    config: Config, mesh: Mesh, timing: Timing | None = None, folder: Path | None = None
) -> Config:
    """The config with auto replaced by the fastest product, as measured by process 0. Raises ConfigError.

    A run with checkpoints in its `folder` keeps the product of the newest one, if these devices can compute it: other
    products round sums differently, and measured again, another one may be the fastest.
    """
    if not is_timed(config, mesh):
        return config
    name = ""
    if is_main_process():
        shape, products = candidates(config, mesh)
        name = _saved(folder, products) if folder else ""
        name = name or _fastest(shape, products, timing or time_products)
    name = from_process(0, name)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, grouped_product=name))


def is_timed(config: Config, mesh: Mesh) -> bool:
    """Whether a run on these devices times the grouped products."""
    compute, moe = ComputeConfig.of(config, mesh), config.model.moe
    is_open = config.train.grouped_product == AUTO and compute.platform in _TIMED
    return bool(is_open and moe.num_experts and moe.sends_sized_rows)


def candidates(config: Config, mesh: Mesh) -> tuple[MatmulShape, Products]:
    """The shape of a run's grouped product, and the products that its devices can compute."""
    platform = ComputeConfig.of(config, mesh).platform
    shape = shape_of(config, mesh, platform)
    return shape, available(GROUPED_PRODUCTS[platform], capability_of(mesh.devices.flat[0]), shape.dtype)


def _saved(folder: Path, products: Products) -> str:
    """The product of the newest checkpoint whose record can be read, which is printed; "" if there is none."""
    with suppress(CheckpointError, OSError):  # reported where the checkpoint is restored
        for step in steps_of(folder):
            with suppress(ValueError, KeyError, TypeError):
                name = str(read_record(storage_of(folder), step).config["train"]["grouped_product"])
                if set(passes_of(name) or [AUTO]) <= products.keys():
                    print(f"train.grouped_product={name}, as in the checkpoint of step {step}", flush=True)
                    return name
                return ""
    return ""


def _fastest(shape: MatmulShape, products: Products, timing: Timing) -> str:
    """The name of the fastest product; prints a line for each pass."""
    seconds, failed = times_of(shape, products, timing)
    name = fastest_of(seconds, shape, products) or next(iter(products))
    print("\n".join([f"train.grouped_product={name}", *_table(seconds, failed)]), flush=True)
    return name


def times_of(shape: MatmulShape, products: Products, timing: Timing) -> InterleavedTimes:
    """The times of all products, from the cache of timings or by timing them."""
    environment = {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__, "products": list(products)}
    key = shape._asdict() | environment
    names = [_label(each, name) for each in _PASSES for name in products]
    seconds, failed = _CACHE.read(key, names), dict[str, str]()
    if seconds is None:
        seconds, failed = timing(shape, products)
        if seconds:
            _CACHE.write(key, seconds)
    return InterleavedTimes(seconds, failed)


def fastest_of(seconds: Mapping[str, float], shape: MatmulShape, products: Products) -> str | None:
    """The name of the fastest product, as `train.grouped_product` has it; None if no pass or not every one was timed.

    Passes are put together from products with the same tile for this shape.
    """
    best: list[tuple[float, PassKernels]] = []
    by_tile: dict[int, list[str]] = defaultdict(list)
    for name, product in products.items():
        by_tile[product.tile(shape.rows, shape.groups)].append(name)
    for names in by_tile.values():
        timed = [
            {name: seconds[_label(each, name)] for name in names if _label(each, name) in seconds} for each in _PASSES
        ]
        if all(timed):
            kernels = PassKernels(*(min(times, key=times.__getitem__) for times in timed))
            best.append((sum(min(times.values()) for times in timed), kernels))
    return min(best)[1].name if best else None


def _label(each: str, name: str) -> str:
    return f"{each} {name}"


def _table(seconds: Mapping[str, float], failed: Mapping[str, str]) -> list[str]:
    """A line for each pass: the times, the shortest first, and what was left out."""
    lines = []
    for each in _PASSES:
        own = {label.removeprefix(f"{each} "): s for label, s in seconds.items() if label.startswith(f"{each} ")}
        times = ", ".join(f"{name} {human_seconds(own[name])}" for name in sorted(own, key=own.__getitem__))
        left_out = "".join(
            f"; left out: {label.removeprefix(f'{each} ')} ({reason})"
            for label, reason in failed.items()
            if label.startswith(f"{each} ")
        )
        lines.append(f"  {each:<8} {times or 'none could be timed'}{left_out}")
    return lines


def shape_of(config: Config, mesh: Mesh, platform: str) -> MatmulShape:
    """The shape of the grouped product for one microbatch."""
    sizes, model = sizes_of(config, platform, mesh.shape), config.model
    groups = config.expert_slots(mesh.shape) // config.mesh.expert_ranks(mesh.shape)
    received = sizes.expert_tensor / sizes.microbatches  # of all ranks that share an expert, in one microbatch
    return MatmulShape(
        rows=int(sizes.rows.sent * received),
        filled=max(int(sizes.local_tokens * model.moe.top_k * received) // groups, 1),
        groups=groups,
        width=model.hidden_size,
        hidden=model.moe.intermediate_size // sizes.expert_tensor,
        dtype=config.train.compute_dtype,
    )


def time_products(shape: MatmulShape, products: Products) -> InterleavedTimes:
    """Time each pass of each product on this process's first device, to the intermediate width and back.

    The results are first compared with those of a loop over tiles; a kernel whose results differ is left out.
    """
    seconds, failed = dict[str, float](), dict[str, str]()
    device = jax.local_devices()[0]
    with ThreadPoolExecutor() as threads, jax.default_device(device):
        compiled = {
            _label(name, product_name): threads.submit(_compiled, shape, name, own, product, device)
            for name in _PASSES
            for product_name, product in products.items()
            if (own := getattr(product, name)) is not None
        }
        for name in _PASSES:  # one after another, so that the operands of one pass are in memory
            checked = _Checked(shape, name)
            calls = {
                label: partial(checked.call, compiled[label], product)
                for product_name, product in products.items()
                if (label := _label(name, product_name)) in compiled
            }
            found = time_interleaved(calls)
            seconds |= found.seconds
            failed |= found.failed
    return InterleavedTimes(seconds, failed)


def _compiled(shape: MatmulShape, name: str, own: Pass, product: GroupedProduct, device: jax.Device) -> Compiled:
    """A pass, compiled. Raises ValueError for widths that the product does not support."""
    tile = product.tile(shape.rows, shape.groups)
    if any(width % product.width_multiple for width in (shape.width, shape.hidden)):
        raise ValueError(f"widths are no multiples of {product.width_multiple}")
    with jax.default_device(device):  # it holds for one thread
        return jax.jit(partial(_both, own, tile)).lower(*_shapes(shape, name, tile)).compile()


class _Checked:
    """Makes calls of one pass whose results agree with those of `blocks`."""

    def __init__(self, shape: MatmulShape, name: str):
        self._shape, self._name = shape, name
        self._operands: dict[int, tuple[Any, jax.Array]] = {}  # by tile
        self._expected: dict[int, list[jax.Array]] = {}

    def call(self, compiled: Future[Compiled], product: GroupedProduct) -> Call:
        """A compiled call with its operands. Raises ValueError if its results are wrong."""
        call, tile = compiled.result(), product.tile(self._shape.rows, self._shape.groups)
        if tile not in self._operands:
            self._operands[tile] = _operands(self._shape, self._name, tile)
        operands = self._operands[tile]
        self._compare(tile, call(*operands))
        return partial(call, *operands)

    def _compare(self, tile: int, found: list[jax.Array]) -> None:
        """Raise ValueError if results differ from those of the reference by more than rounding."""
        if tile not in self._expected:
            reference = jax.jit(partial(_both, _REFERENCE[self._name], tile))
            self._expected[tile] = _projected(reference(*self._operands[tile]))
        for one, other in zip(_projected(found), self._expected[tile], strict=True):
            error = float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))
            if not error < _MOST_ERROR:  # also if it is not a number
                raise ValueError(f"its results differ from those of blocks by {error:.1e}")


_REFERENCE: dict[str, Pass] = {"forward": blocks, "dgrad": blocks_dgrad, "wgrad": blocks_wgrad}
_MOST_ERROR = 0.02  # of bfloat16 sums, in another order


def _shapes(shape: MatmulShape, name: str, tile: int) -> Any:
    """The shapes of a pass' operands."""
    return jax.eval_shape(partial(_operands, shape, name, tile))


def _operands(shape: MatmulShape, name: str, tile: int) -> tuple[Any, jax.Array]:
    """The operands of a pass there and back: groups of whole tiles, in a buffer for as many rows as a step has."""
    groups = shape.groups
    capacity = -(-(shape.rows + groups * (tile - 1)) // tile) * tile
    size = min(-(-shape.filled // tile) * tile, capacity // groups // tile * tile)
    narrow, wide = (capacity, shape.width), (capacity, shape.hidden)
    up, down = (groups, shape.width, shape.hidden), (groups, shape.hidden, shape.width)
    pairs = {"forward": ((narrow, up), (wide, down)), "dgrad": ((wide, up), (narrow, down))}
    shapes = pairs.get(name, ((narrow, wide), (wide, narrow)))
    # random numbers, scaled so that products keep their magnitude: zeros would be faster than the numbers of a step
    keys = iter(jax.random.split(jax.random.key(0), 4))
    drawn = [[jax.random.normal(next(keys), each, shape.dtype) / each[-1] ** 0.5 for each in pair] for pair in shapes]
    return drawn, jnp.full(groups, size, jnp.int32)


def _both(own: Pass, tile: int, operands: Any, size_L: jax.Array) -> list[jax.Array]:
    return [own(left, right, size_L, tile) for left, right in operands]


@jax.jit
def _projected(results: list[jax.Array]) -> list[jax.Array]:
    """The sums of results along their last dimension with random weights, so that little is kept for comparisons."""
    weights = (jax.random.normal(jax.random.key(1), each.shape[-1:]) for each in results)
    return [each.astype(jnp.float32) @ weight for each, weight in zip(results, weights, strict=True)]
