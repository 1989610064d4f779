"""A part of `bench_gpu.py`: which blocks suit the Hopper kernels of grouped products, pass by pass, up and down.

Up is to the experts' intermediate width, down is back. Before it is timed, each candidate is compared with one batched
product of XLA, since all groups are equal here. No grouped product is expected to be faster than that.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled
from parts import Put, Values
from results_file import rounded

from moe_jax.config import Config
from moe_jax.config.attention_kernels import HOPPER
from moe_jax.measure.interleaved_timing import Call, time_interleaved
from moe_jax.models.grouped_hopper import WIDTH_MULTIPLE, Blocks, hopper, hopper_dgrad, hopper_wgrad
from moe_jax.models.grouped_kernel import pallas, pallas_dgrad, pallas_wgrad
from moe_jax.models.transformer import capability_of
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.choose_grouped_matmul import candidates

Product = Callable[..., jax.Array]
_TILE = 128
_MOST_ERROR = 0.01
_WIDE, _NARROW = 2 * WIDTH_MULTIPLE, WIDTH_MULTIPLE
_TRIED = {
    "wide": Blocks(_TILE, _WIDE),
    "wide, 1 unfinished": Blocks(_TILE, _WIDE, unfinished=1),
    "wide, halves of columns": Blocks(_TILE, _WIDE, splits_rows=False),
    "wide, 3 steps": Blocks(_TILE, _WIDE, steps=3),
    "wide, band 1": Blocks(_TILE, _WIDE, band=1),
    "wide, band 16": Blocks(_TILE, _WIDE, band=16),
    "wide, bands of columns": Blocks(_TILE, _WIDE, along=1),
    "narrow": Blocks(_TILE, _NARROW),
    "narrow, 1 unfinished": Blocks(_TILE, _NARROW, unfinished=1),
    "narrow, 6 steps": Blocks(_TILE, _NARROW, steps=6),
    "narrow, band 1": Blocks(_TILE, _NARROW, band=1),
}
_OWN: dict[str, tuple[Product, Product]] = {  # of each pass: the kernel for Hopper, and that of Pallas' Triton backend
    "forward": (hopper, pallas),
    "dgrad": (hopper_dgrad, pallas_dgrad),
    "wgrad": (hopper_wgrad, pallas_wgrad),
}
_BATCHED = {"forward": "gsd,gdf->gsf", "dgrad": "gsf,gdf->gsd", "wgrad": "gsd,gsf->gdf"}


class _Operands(NamedTuple):
    """The operands of one pass."""

    left: jax.Array
    right: jax.Array
    size_L: jax.Array


def measure(put: Put, configs: Mapping[str, Config], rates: Values) -> None:
    """Time all candidates at the sizes of each model's step; `share_of_rate` compares with one large product."""
    if (capability_of(jax.devices()[0]) or (0, 0))[0] != HOPPER[0]:
        return put({"skipped": "this is no Hopper GPU"})
    for name, config in configs.items():
        shape, _ = candidates(config, make_mesh(config.mesh, jax.devices()[:1]))
        size = -(-shape.filled // _TILE) * _TILE
        flops = 2 * size * shape.groups * shape.width * shape.hidden
        found: Values = {}
        for label, own, operands in _passes(size, shape.groups, shape.width, shape.hidden):
            times = time_interleaved(_made(own, operands), rounds=5, round_s=0.01)
            fastest_first = sorted(times.seconds.items(), key=lambda each: each[1])
            shares = {each: rounded(flops / time_s / rates["matrix_flops_per_s"]) for each, time_s in fastest_first}
            found[label] = {"share_of_rate": shares, "left_out": times.failed}
            put({name: found})
    return None


def _passes(size: int, groups: int, width: int, hidden: int) -> Iterator[tuple[str, str, _Operands]]:
    """Yield a label, the pass and its operands. Groups have `size` rows each."""
    keys, rows = jax.random.split(jax.random.key(0), 3), size * groups
    for way, (d, f) in {"up": (width, hidden), "down": (hidden, width)}.items():
        shapes = (rows, d), (groups, d, f), (rows, f)
        x, w, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        for own, (left, right) in {"forward": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}.items():
            yield f"{own} {way}", own, _Operands(left, right, jnp.full(groups, size, jnp.int32))


def _made(name: str, operands: _Operands) -> dict[str, Callable[[], Call]]:
    """Compile all candidates of a pass in threads, and return makers of their calls."""
    batched = jax.jit(partial(_batched, equation=_BATCHED[name]))
    reference = batched(*operands)
    calls = _candidates(name, reference.shape[-1]) | {"one batched product": batched}
    with ThreadPoolExecutor() as threads:
        compiled = {label: threads.submit(_compiled, call, operands) for label, call in calls.items()}
    return {label: partial(_checked, future, operands, reference) for label, future in compiled.items()}


def _candidates(name: str, columns: int) -> dict[str, Product]:
    own, triton = _OWN[name]
    calls: dict[str, Product] = {
        label: partial(own, tile=_TILE, blocks=blocks)
        for label, blocks in _TRIED.items()
        if columns % blocks.columns == 0
    }
    return calls | {"triton": partial(triton, tile=_TILE)}


def _batched(left: jax.Array, right: jax.Array, size_L: jax.Array, equation: str) -> jax.Array:
    def grouped(x: jax.Array) -> jax.Array:
        return x if x.ndim == 3 else x.reshape(len(size_L), -1, x.shape[-1])

    product = jnp.einsum(equation, grouped(left), grouped(right))
    return product if equation == _BATCHED["wgrad"] else product.reshape(-1, product.shape[-1])


def _compiled(call: Product, operands: _Operands) -> Compiled:
    return jax.jit(call).lower(*operands).compile()


def _checked(future: Future[Compiled], operands: _Operands, expected: jax.Array) -> Call:
    """Return a call. Raises ValueError if its results differ from the expected ones by more than rounding."""
    call: Any = future.result()
    error = float(_error(call(*operands), expected))
    if not error < _MOST_ERROR:
        raise ValueError(f"its results differ by {error:.1e}")
    return partial(call, *operands)


@jax.jit
def _error(found: jax.Array, expected: jax.Array) -> jax.Array:
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())
