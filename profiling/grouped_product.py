"""How fast is the experts' grouped product on CPU? python profiling/grouped_product.py [ROUNDS]

The product of `models/grouped_matmul.py` against `jax.lax.ragged_dot`, and against a batched product of as many rows in
groups of equal size, in turn: one call after another, forward alone and with both gradients. Two minutes.
S rows, L groups of uneven sizes, D and F widths.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from count_argument import count_argument
from results_file import quartiles, write_result

from moe_jax.errors import run_command
from moe_jax.models.grouped_matmul import GROUPED_PRODUCTS
from moe_jax.train.processes import Processes, initialize

SHAPES = {
    "S=2048 L=32 D=256 F=512": (2048, 32, 256, 512),
    "S=4096 L=32 D=256 F=512": (4096, 32, 256, 512),
    "S=2048 L=8 D=512 F=1024": (2048, 8, 512, 1024),
}
RTOL, ATOL = 1e-4, 1e-3  # sums of up to thousands of products of standard normal numbers

Call = Callable[[], Any]


class Case(NamedTuple):
    """A product's forward pass, and the pass with both gradients."""

    forward: Call
    both: Call


def main() -> None:
    """Measure and write results/grouped_product.json."""
    rounds = count_argument("ROUNDS", 7, __doc__)
    initialize(Processes(mode="off"), 1)
    values: dict[str, object] = {"rounds": rounds, "rtol": RTOL, "atol": ATOL}
    for name, shape in SHAPES.items():
        values[name] = measure(rounds, *shape)
    write_result("grouped_product", values)


def measure(rounds: int, rows: int, groups: int, width: int, hidden: int) -> dict[str, Any]:
    """Ratios of times, after the results were compared."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 3.0)))
    product = GROUPED_PRODUCTS["cpu"]
    tile = product.tile(rows, groups)
    padded = -(-sizes // tile) * tile
    num_rows = -(-(rows + groups * (tile - 1)) // tile) * tile  # as many as there may be, as in a step
    place = np.concatenate([np.arange(size) + first for size, first in zip(sizes, _starts(padded), strict=True)])

    def spread(x: np.ndarray) -> np.ndarray:
        """Rows with each group padded to whole tiles."""
        wide = np.zeros((num_rows, x.shape[1]), np.float32)
        wide[place] = x
        return wide

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    x, w, dy = normal(rows, width), normal(groups, width, hidden), normal(rows, hidden)
    cases = {
        "ragged_dot": _case(lambda x, w, size: jax.lax.ragged_dot(x, w, size), x, w, sizes, dy),
        "ours": _case(lambda x, w, size: product.multiply(x, w, size, tile), spread(x), w, padded, spread(dy)),
        "even": _case(_even, x, w, sizes, dy),
    }
    expected, found = (jax.device_get(cases[name].both()) for name in ("ragged_dot", "ours"))
    for wanted, each in zip(expected, (found[0][place], found[1][place], found[2]), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=RTOL, atol=ATOL)
    found_s = {name: _in_turn(cases, name, rounds) for name in ("forward", "both")}
    return {
        "tile": tile,
        "rows_with_padding": int(padded.sum()),
        **{
            f"{pass_name}_{over}_over_ours": quartiles([a / b for a, b in zip(times[over], times["ours"], strict=True)])
            for pass_name, times in found_s.items()
            for over in ("ragged_dot", "even")
        },
        "ours_ms": {name: round(statistics.median(times["ours"]) * 1e3, 1) for name, times in found_s.items()},
    }


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(sizes) - sizes


def _even(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
    groups, width, _hidden = w.shape
    return jnp.einsum("lrd,ldf->lrf", x.reshape(groups, -1, width), w).reshape(len(x), -1)


def _case(function: Callable[..., jax.Array], x: np.ndarray, w: np.ndarray, sizes: np.ndarray, dy: np.ndarray) -> Case:
    def both(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return y, *pull(dy)

    given = [jax.device_put(each) for each in (x, w, sizes.astype(np.int32), dy)]
    forward, backward = jax.jit(function), jax.jit(both)
    return Case(lambda: forward(*given[:3]), lambda: backward(*given))


def _in_turn(cases: dict[str, Case], name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; the first round compiles."""
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases if turn % 2 else reversed(cases):
            start = time.perf_counter()
            jax.block_until_ready(getattr(cases[case], name)())
            seconds[case] += [time.perf_counter() - start] if turn else []
    return seconds


if __name__ == "__main__":
    run_command(main)
