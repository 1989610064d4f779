"""A part of `bench_gpu.py`: every kernel of this platform against its slow reference, values and gradients.

Errors are ‖out - reference‖ / ‖reference‖. The reference has the same bfloat16 operands and computes in float32 at the
highest precision: one product of equal groups for grouped products, attention with all logits for attention kernels.
S rows, L groups, D and F widths.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from parts import Put, Values, one_line
from results_file import rounded

from moe_jax.models.attention.kernels import KERNELS
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct, Pass, available
from moe_jax.models.transformer import capability_of

MOST_ERROR = 1e-2  # of bfloat16 results; one rounding alone is about 2e-3
_SHAPES = ((4096, 8, 2048, 1408), (2048, 64, 1408, 2048))
_TOY_SHAPES = ((256, 4, 64, 32),)
_ATTENTION = ((128, 128), (192, 128))  # widths of keys and of values: grouped-query, latent


def measure(put: Put, toy: bool) -> None:
    """Compare all kernels. Those that do not run here are reported with the reason, and count as wrong."""
    platform, capability = jax.default_backend(), capability_of(jax.devices()[0])
    checks: dict[str, Callable[[], Values]] = {}
    for shape in _TOY_SHAPES if toy else _SHAPES:
        for name, product in available(GROUPED_PRODUCTS[platform], capability, "bfloat16").items():
            checks[f"{name} {'×'.join(map(str, shape))}"] = partial(_grouped, product, *shape)
    if platform == "gpu":
        for widths in _ATTENTION:
            checks[f"cudnn {widths[0]}/{widths[1]}"] = partial(_attention, KERNELS["cudnn"], *widths)
    errors: Values = {}
    for name, check in checks.items():
        try:
            errors[name] = check()
        except Exception as error:
            errors[name] = {"failed": one_line(error)}
        put({"errors": errors})
    wrong = [name for name, found in errors.items() if "failed" in found or max(found.values()) > MOST_ERROR]
    put({"kernels": len(errors), "wrong": wrong})


def _grouped(product: GroupedProduct, rows: int, groups: int, width: int, hidden: int) -> Values:
    """Compare a grouped product: groups of uneven sizes, one of them empty, and NaN in the rows beyond them."""
    tile = product.tile(rows, groups)
    sizes = np.random.default_rng(0).multinomial(rows // tile, np.full(groups, 1 / groups)) * tile
    sizes[0] = 0
    total, capacity = int(sizes.sum()), rows + groups * tile
    x, w, dy = _normal((capacity, width), (groups, width, hidden), (capacity, hidden))
    exists = (jnp.arange(capacity) < total)[:, None]
    x, dy, size_L = jnp.where(exists, x, jnp.nan), jnp.where(exists, dy, 0), jnp.array(sizes, jnp.int32)

    def run(own: Pass | None, left: jax.Array, right: jax.Array) -> jax.Array | None:
        return None if own is None else jax.jit(own, static_argnums=3)(left, right, size_L, tile)

    found = {
        "forward": run(product.forward, x, w),
        "dgrad": run(product.dgrad, dy, w),
        "wgrad": run(product.wgrad, x, dy),
    }
    found |= {name: y[:total] for name, y in found.items() if name != "wgrad" and y is not None}

    # each group padded to the largest: one product for each group would be compiled for each size
    offset = np.cumsum(sizes) - sizes
    row_LS = np.minimum(offset[:, None] + np.arange(sizes.max()), total - 1)
    group = np.repeat(np.arange(groups), sizes)

    def batched(x: jax.Array, w: jax.Array) -> jax.Array:
        y_LSF = jnp.einsum("gsd,gdf->gsf", x[row_LS], w)
        return y_LSF[group, np.arange(total) - offset[group]]

    return _errors(found, batched, (x[:total], w), dy[:total])


def _attention(kernel: Callable[..., jax.Array], width: int, value_width: int) -> Values:
    shape = (2, 1024, 16)
    q, k, v, dy = _normal((*shape, width), (*shape, width), (*shape, value_width), (*shape, value_width))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(partial(kernel, window=None, scale=width**-0.5), q, k, v)
        return y, *pull(dy)

    reference = partial(KERNELS["xla"], window=None, scale=width**-0.5)
    names = ("forward", "queries_gradient", "keys_gradient", "values_gradient")
    found = dict(zip(names, jax.jit(gradients)(q, k, v, dy), strict=True))
    return _errors(found, reference, (q, k, v), dy)


def _errors(
    found: Mapping[str, jax.Array | None],
    reference: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    dy: jax.Array,
) -> Values:
    """Return the error of each result that there is; `reference` has the value and the gradients in their order."""

    def exact(operands: Sequence[jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
        with jax.default_matmul_precision("highest"):
            y, pull = jax.vjp(reference, *operands)
            return y, *pull(dy)

    wide: Any = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, dy))
    pairs = zip(found.items(), jax.jit(exact)(*wide), strict=True)
    return {name: rounded(_error(one, other)) for (name, one), other in pairs if one is not None}


def _error(found: jax.Array, expected: jax.Array) -> float:
    """Return the relative error; infinity if a number of the result is not finite."""
    error = jnp.linalg.norm(found.astype(jnp.float32).ravel() - expected.ravel()) / jnp.linalg.norm(expected.ravel())
    return float(jnp.where(jnp.isfinite(error), error, jnp.inf))


def _normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
