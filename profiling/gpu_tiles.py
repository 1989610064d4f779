"""A part of `bench_gpu.py`: which blocks suit the Hopper kernels of grouped products, pass by pass and both ways.

Every candidate is compared with XLA's product of one group after another before it is timed. S rows, L groups, D and F
widths.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled
from parts import Put, Values
from results_file import rounded

from moe_jax.config import Config
from moe_jax.measure.interleaved_timing import Call, time_interleaved
from moe_jax.models.grouped_hopper import Blocks, hopper_rows, hopper_weights
from moe_jax.models.grouped_kernel import pallas, pallas_dgrad, pallas_wgrad
from moe_jax.models.grouped_mosaic import _HOPPER
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.choose_grouped_matmul import candidates

_TILE = 128
_MOST_ERROR = 0.01
_TRIED: dict[str, dict[str, Any]] = {
    "4 steps": {},
    "4 steps, 1 unfinished": {"unfinished": 1},
    "columns split": {"splits_rows": False},
    "band 1": {"band": 1},
    "band 16": {"band": 16},
    "band 8 of columns": {"along": 1},
    "3 steps": {"steps": 3},
}
_NARROW: dict[str, dict[str, Any]] = {
    "narrow, 4 steps": {},
    "narrow, 6 steps": {"steps": 6},
}


def measure(put: Put, configs: Mapping[str, Config], rates: Values) -> None:
    """Time all candidates at the sizes of each model's step."""
    for name, config in configs.items():
        shape, _ = candidates(config, make_mesh(config.mesh, jax.devices()[:1]))
        size = -(-shape.filled // _TILE) * _TILE
        ways = {"up": (shape.width, shape.hidden), "down": (shape.hidden, shape.width)}
        _time(lambda found, name=name: put({name: found}), size, shape.groups, ways, rates)


def _time(put: Put, size: int, groups: int, ways: Mapping[str, tuple[int, int]], rates: Values) -> None:
    rows = size * groups
    keys = jax.random.split(jax.random.key(0), 3)
    found: Values = {}
    with ThreadPoolExecutor() as threads:
        for way, (D, F) in ways.items():
            x = jax.random.normal(keys[0], (rows, D), jnp.bfloat16)
            w = jax.random.normal(keys[1], (groups, D, F), jnp.bfloat16)
            dy = jax.random.normal(keys[2], (rows, F), jnp.bfloat16)
            size_L = jnp.full(groups, size, jnp.int32)
            grouped = {"x": x.reshape(groups, size, D), "dy": dy.reshape(groups, size, F)}
            passes = {
                "forward": ((x, w), lambda w=w, g=grouped: jnp.einsum("gsd,gdf->gsf", g["x"], w).reshape(rows, -1)),
                "dgrad": ((dy, w), lambda w=w, g=grouped: jnp.einsum("gsf,gdf->gsd", g["dy"], w).reshape(rows, -1)),
                "wgrad": ((x, dy), lambda g=grouped: jnp.einsum("gsd,gsf->gdf", g["x"], g["dy"])),
            }
            for name, (operands, expected) in passes.items():
                columns = D if name == "dgrad" else F
                calls = _candidates(name, columns)
                compiled = {label: threads.submit(_compiled, call, *operands, size_L) for label, call in calls.items()}
                twin = jax.jit(expected)
                compiled["one batched product of XLA"] = threads.submit(lambda twin=twin: _Ignoring(twin))
                reference = twin()
                made = {
                    label: partial(_checked, future, (*operands, size_L), reference)
                    for label, future in compiled.items()
                }
                times = time_interleaved(made, rounds=5, round_s=0.01)
                flops = 2 * rows * D * F
                found[f"{name} {way}"] = {
                    "share_of_rate": {
                        label: rounded(flops / seconds / rates["matrix_flops_per_s"])
                        for label, seconds in sorted(times.seconds.items(), key=lambda each: each[1])
                    },
                    "failed": times.failed,
                }
                put(found)


class _Ignoring:
    """A call without operands, called like the candidates."""

    def __init__(self, call: Callable[[], jax.Array]):
        self._call = call

    def __call__(self, *_: jax.Array) -> jax.Array:
        return self._call()


def _candidates(name: str, columns: int) -> dict[str, Callable[..., jax.Array]]:
    wide = 256 if columns % 256 == 0 else 128
    tried = {label: Blocks(_TILE, wide, **options) for label, options in _TRIED.items()}
    if wide == 256:
        tried |= {label: Blocks(_TILE, 128, **options) for label, options in _NARROW.items()}
    else:
        tried |= {label.removeprefix("narrow, "): Blocks(_TILE, 128, **options) for label, options in _NARROW.items()}
    calls: dict[str, Callable[..., jax.Array]] = {}
    for label, blocks in tried.items():
        if name == "wgrad":
            calls[label] = partial(_weights, blocks=blocks)
        else:
            calls[label] = partial(_rows, contracted=1 if name == "forward" else 2, blocks=blocks)
    triton = {"forward": pallas, "dgrad": pallas_dgrad, "wgrad": pallas_wgrad}[name]
    calls["triton"] = lambda left, right, size_L: triton(left, right, size_L, _TILE)
    for band in (1, 8):
        if (columns // 128) % band == 0:
            calls[f"jax's, band {band}"] = partial(_shipped, name=name, options=_HOPPER | {"grid_block_n": band})
    return calls


def _rows(x: jax.Array, w: jax.Array, size_L: jax.Array, contracted: int, blocks: Blocks) -> jax.Array:
    return hopper_rows(x, w, size_L, contracted, blocks)


def _weights(x: jax.Array, dy: jax.Array, size_L: jax.Array, blocks: Blocks) -> jax.Array:
    return hopper_weights(x, dy, size_L, blocks)


def _shipped(left: jax.Array, right: jax.Array, size_L: jax.Array, name: str, options: Any) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    if name == "wgrad":
        return transposed_ragged_dot(left, right, group_sizes=size_L, **options)
    return ragged_dot(left, right, group_sizes=size_L, transpose_rhs=name == "dgrad", **options)


def _compiled(call: Callable[..., jax.Array], *operands: jax.Array) -> Compiled:
    return jax.jit(call).lower(*operands).compile()


def _checked(future: Future[Any], operands: tuple[jax.Array, ...], expected: jax.Array) -> Call:
    call = future.result()
    error = float(_error(call(*operands), expected))
    if not error < _MOST_ERROR:
        raise ValueError(f"its results differ by {error:.1e}")
    return partial(call, *operands)


@jax.jit
def _error(found: jax.Array, expected: jax.Array) -> jax.Array:
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())
