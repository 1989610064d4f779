"""The grouped product for Hopper GPUs, in the interpreter of its backend, against a loop over groups."""

import importlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models import hopper_kernels
from moe_jax.models.grouped_hopper import Blocks, hopper, hopper_dgrad, hopper_wgrad

D, F = 256, 384
# Two warpgroups split rows of blocks, and columns of small ones; the last rows belong to no group.
CASES = {64: (64, 0, 192), 128: (128, 0, 256)}
ROWS = 512
ROUNDING = 2**-8  # of bfloat16


IS_OLD = jax.__version_info__ < (0, 11)
interpreter = importlib.import_module(
    "jax._src.pallas.mosaic_gpu.interpret.params" if IS_OLD else "jax.experimental.pallas.mosaic_gpu"
)
transposed = pytest.mark.skipif(
    IS_OLD, reason="this jax interprets no transposed operands; scripts/smoke.sh runs this with a newer one"
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hopper_kernels, "_MULTIPROCESSORS", 3)
    with interpreter.force_gpu_interpret_mode():
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_close(found: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(wide(found), expected, rtol=ROUNDING, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("name", ["forward", *(pytest.param(name, marks=transposed) for name in ("dgrad", "wgrad"))])
@pytest.mark.parametrize("tile", CASES)
def test_a_pass_equals_a_loop_over_groups(tile: int, name: str) -> None:
    sizes = CASES[tile]
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    w_LDF, size_L = normal(1, len(sizes), D, F), jnp.array(sizes, jnp.int32)
    x_SD, dy_SF = (x.at[ends[-1] :].set(jnp.nan) for x in (normal(0, ROWS, D), normal(2, ROWS, F)))
    found, expected = {
        "forward": (lambda: hopper(x_SD, w_LDF, size_L, tile), np.zeros((ROWS, F))),
        "dgrad": (lambda: hopper_dgrad(dy_SF, w_LDF, size_L, tile), np.zeros((ROWS, D))),
        "wgrad": (lambda: hopper_wgrad(x_SD, dy_SF, size_L, tile), np.zeros((len(sizes), D, F))),
    }[name]
    for group, rows in enumerate(groups):
        x, w, dy = wide(x_SD[rows]), wide(w_LDF[group]), wide(dy_SF[rows])
        if name == "wgrad":
            expected[group] = x.T @ dy
        else:
            expected[rows] = x @ w if name == "forward" else dy @ w.T
    assert_close(found(), expected)


@pytest.mark.parametrize(
    "blocks", [Blocks(128, 128, splits_rows=False, along=1), Blocks(128, 128, unfinished=1, steps=3, band=2)]
)
def test_other_blocks_have_the_same_results(blocks: Blocks) -> None:
    """Those that profiling/gpu_tiles.py times."""
    x_SD, w_LDF, size_L = normal(0, ROWS, D), normal(1, 3, D, F), jnp.array([128, 128, 256], jnp.int32)
    assert_close(hopper(x_SD, w_LDF, size_L, 128, blocks), wide(hopper(x_SD, w_LDF, size_L, 128)))
