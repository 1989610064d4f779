"""The grouped product for Hopper GPUs, in the interpreter of its backend, against a loop over groups."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from moe_jax.models import grouped_hopper
from moe_jax.models.grouped_hopper import Blocks, hopper, hopper_dgrad, hopper_wgrad

D, F = 256, 384
# Two warpgroups split rows of blocks, and columns of small ones; the last rows belong to no group.
CASES = {64: (64, 0, 192), 128: (128, 0, 256)}
ROWS = 512
ROUNDING = 2**-8  # of bfloat16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if jax.__version_info__ < (0, 11):
        pytest.skip("the interpreter of this jax does not know transposed operands; scripts/smoke.sh has a newer one")
    monkeypatch.setattr(grouped_hopper, "_MULTIPROCESSORS", 3)
    with mosaic_gpu.force_gpu_interpret_mode():
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_close(found: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(wide(found), expected, rtol=ROUNDING, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("tile", CASES)
def test_all_passes_equal_a_loop_over_groups(tile: int) -> None:
    sizes = CASES[tile]
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    w_LDF, size_L = normal(1, len(sizes), D, F), jnp.array(sizes, jnp.int32)
    x_SD, dy_SF = (x.at[ends[-1] :].set(jnp.nan) for x in (normal(0, ROWS, D), normal(2, ROWS, F)))
    y_SF, dx_SD, dw_LDF = np.zeros((ROWS, F)), np.zeros((ROWS, D)), np.zeros((len(sizes), D, F))
    for group, rows in enumerate(groups):
        y_SF[rows] = wide(x_SD[rows]) @ wide(w_LDF[group])
        dx_SD[rows] = wide(dy_SF[rows]) @ wide(w_LDF[group]).T
        dw_LDF[group] = wide(x_SD[rows]).T @ wide(dy_SF[rows])
    assert_close(hopper(x_SD, w_LDF, size_L, tile), y_SF)
    assert_close(hopper_dgrad(dy_SF, w_LDF, size_L, tile), dx_SD)
    assert_close(hopper_wgrad(x_SD, dy_SF, size_L, tile), dw_LDF)


@pytest.mark.parametrize(
    "blocks", [Blocks(128, 128, splits_rows=False, along=1), Blocks(128, 128, unfinished=1, steps=3, band=2)]
)
def test_other_blocks_have_the_same_results(blocks: Blocks) -> None:
    """Those that profiling/gpu_tiles.py times."""
    x_SD, w_LDF, size_L = normal(0, ROWS, D), normal(1, 3, D, F), jnp.array([128, 128, 256], jnp.int32)
    assert_close(hopper(x_SD, w_LDF, size_L, 128, blocks), wide(hopper(x_SD, w_LDF, size_L, 128)))
