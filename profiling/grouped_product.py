"""How fast are the experts' grouped products here? python profiling/grouped_product.py [ROUNDS]

Measures the products of `models/grouped_products.py` against `jax.lax.ragged_dot`, and against a batched product of as
many rows in groups of equal size, alternately: one call after another, forward alone and with both gradients. Ratios
are relative to the project's product for this platform, named "ours"; on a GPU its other products follow by their
names. Takes two minutes on a CPU. Symbols: S rows, L groups of uneven sizes, D and F widths.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from count_argument import count_argument
from results_file import quartiles, write_result

from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct, available, product_of
from moe_jax.models.transformer import capability_of

_SMALL = ((2048, 32, 256, 512), (4096, 32, 256, 512), (2048, 8, 512, 1024))
# Fine-grained experts of a few widths, few and many of them on a device; and coarse ones.
_LARGE = ((24576, 8, 2048, 1408), (24576, 64, 2048, 1408), (16384, 8, 4096, 14336))
SHAPES = {"cpu": _SMALL, "gpu": _LARGE, "tpu": _LARGE}
# Tolerances of sums of up to thousands of products of standard normal numbers. Accelerators round operands to 8 or
# 11 bits.
_TOLERANCES = {"cpu": (1e-4, 1e-3), "gpu": (2e-2, 2.0), "tpu": (2e-2, 2.0)}
_DTYPES = {"cpu": jnp.float32, "gpu": jnp.bfloat16, "tpu": jnp.bfloat16}

Call = Callable[[], Any]


class Case(NamedTuple):
    """A product's forward pass, and the pass with both gradients."""

    forward: Call
    both: Call


def main() -> None:
    """Measure and write results/grouped_product.json, or the platform's own file."""
    rounds = count_argument("ROUNDS", 7, __doc__)
    initialize(Processes(mode="off"), None)
    platform = jax.default_backend()
    rtol, atol = _TOLERANCES[platform]
    values: dict[str, object] = {"rounds": rounds, "rtol": rtol, "atol": atol}
    for rows, groups, width, hidden in SHAPES[platform]:
        name = f"S={rows} L={groups} D={width} F={hidden}"
        values[name] = measure(platform, rounds, rows, groups, width, hidden)
    write_result("grouped_product" if platform == "cpu" else f"grouped_product_{platform}", values)


def measure(platform: str, rounds: int, rows: int, groups: int, width: int, hidden: int) -> dict[str, Any]:
    """Check results against each other, then return ratios of times."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 3.0)))
    usable = available(GROUPED_PRODUCTS[platform], capability_of(jax.devices()[0]), jnp.dtype(_DTYPES[platform]).name)
    (_, own), *others = ((name, product) for name, product in usable.items() if product_of(name, usable))
    products = {"ours": own, **dict(others)}

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(_DTYPES[platform])

    x, w, dy = normal(rows, width), normal(groups, width, hidden), normal(rows, hidden)
    made: dict[str, Callable[[], Case]] = {
        "ragged_dot": partial(_case, jax.lax.ragged_dot, x, w, sizes, dy),
        **{name: partial(_padded, product, x, w, sizes, dy) for name, product in products.items()},
        "even": partial(_case, _even, x, w, sizes, dy),
    }
    cases, left_out = _runnable(made)
    expected = jax.device_get(cases["ragged_dot"].both()) if "ragged_dot" in cases else None
    for name in products.keys() & cases.keys():
        place, found = _places(products[name], rows, groups, sizes), jax.device_get(cases[name].both())
        found = (found[0][place], found[1][place], found[2])
        rtol, atol = _TOLERANCES[platform]
        for wanted, each in zip(expected or found, found, strict=True):
            np.testing.assert_allclose(np.float32(each), np.float32(wanted), rtol=rtol, atol=atol, err_msg=name)
    found_s = {name: _alternating(cases, name, rounds) for name in ("forward", "both")}
    tile = own.tile(rows, groups)
    return {
        "tile": tile,
        "rows_with_padding": int((-(-sizes // tile) * tile).sum()),
        **{
            f"{pass_name}_{over}_over_ours": quartiles([a / b for a, b in zip(times[over], times["ours"], strict=True)])
            for pass_name, times in found_s.items()
            for over in cases
            if over != "ours"
        },
        "ours_ms": {name: round(statistics.median(times["ours"]) * 1e3, 1) for name, times in found_s.items()},
        **({"left_out": left_out} if left_out else {}),
    }


def _runnable(made: dict[str, Callable[[], Case]]) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the cases that run here, and the errors of the others: XLA's form of one may not fit into memory."""
    cases, left_out = {}, {}
    for name, make in made.items():
        try:
            case = make()
            jax.block_until_ready((case.forward(), case.both()))
            cases[name] = case
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return cases, left_out


def _places(product: GroupedProduct, rows: int, groups: int, sizes: np.ndarray) -> np.ndarray:
    """Return the position of each row if each group is padded to whole tiles."""
    tile = product.tile(rows, groups)
    padded = -(-sizes // tile) * tile
    return np.concatenate([np.arange(size) + first for size, first in zip(sizes, _starts(padded), strict=True)])


def _padded(product: GroupedProduct, x: np.ndarray, w: np.ndarray, sizes: np.ndarray, dy: np.ndarray) -> Case:
    rows, groups, tile = len(x), len(w), product.tile(len(x), len(w))
    num_rows = -(-(rows + groups * (tile - 1)) // tile) * tile  # the largest number there may be, as in a step
    place = _places(product, rows, groups, sizes)

    def spread(x: np.ndarray) -> np.ndarray:
        wide = np.zeros((num_rows, x.shape[1]), x.dtype)
        wide[place] = x
        return wide

    def multiply(x: jax.Array, w: jax.Array, size: jax.Array) -> jax.Array:
        return product.multiply(x, w, size, tile)

    return _case(multiply, spread(x), w, -(-sizes // tile) * tile, spread(dy))


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(sizes) - sizes


def _even(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
    groups, width, _hidden = w.shape
    return jnp.einsum("lrd,ldf->lrf", x.reshape(groups, -1, width), w).reshape(len(x), -1)


def _case(function: Callable[..., jax.Array], x: np.ndarray, w: np.ndarray, sizes: np.ndarray, dy: np.ndarray) -> Case:
    def both(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return y, *pull(dy)

    inputs = [jax.device_put(each) for each in (x, w, sizes.astype(np.int32), dy)]
    forward, backward = jax.jit(function), jax.jit(both)
    return Case(lambda: forward(*inputs[:3]), lambda: backward(*inputs))


def _alternating(cases: dict[str, Case], name: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each case in each round; the first round compiles."""
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for round_index in range(rounds + 1):
        for case in cases if round_index % 2 else reversed(cases):
            start = time.perf_counter()
            jax.block_until_ready(getattr(cases[case], name)())
            seconds[case] += [time.perf_counter() - start] if round_index else []
    return seconds


if __name__ == "__main__":
    run_command(main)
