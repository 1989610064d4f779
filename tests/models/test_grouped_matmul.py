"""The grouped products of all platforms against a loop over groups: values and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.grouped_matmul import GROUPED_PRODUCTS, GroupedProduct

ROWS, GROUPS, D, F = 96, 4, 6, 3


def loop(x_SD, w_LDF, sizes):
    out, start = [], 0
    for w_DF, size in zip(w_LDF, sizes, strict=True):
        out.append(x_SD[start : start + size] @ w_DF)
        start += size
    return jnp.concatenate([*out, jnp.zeros((x_SD.shape[0] - start, w_LDF.shape[2]))])


@pytest.mark.parametrize("product", GROUPED_PRODUCTS.values(), ids=GROUPED_PRODUCTS)
@pytest.mark.parametrize("sizes", [(16, 0, 64, 8), (0, 0, 0, 0), (96, 0, 0, 0), (0, 0, 0, 8), (24, 32, 8, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_a_loop_over_groups(product, sizes, dtype):
    x_SD, w_LDF, dy_SF = (
        jax.random.normal(jax.random.key(i), shape).astype(dtype)
        for i, shape in enumerate([(ROWS, D), (GROUPS, D, F), (ROWS, F)])
    )
    dy_SF = jnp.where(jnp.arange(ROWS)[:, None] < sum(sizes), dy_SF, 0)
    actual, pull = jax.vjp(lambda x, w: product.multiply(x, w, jnp.array(sizes, jnp.int32), 8), x_SD, w_LDF)
    wide = (each.astype(jnp.float32) for each in (x_SD, w_LDF))
    expected, pull_expected = jax.vjp(lambda x, w: loop(x, w, sizes), *wide)
    assert actual.dtype == dtype
    found, wanted = [actual, *pull(dy_SF)], [expected, *pull_expected(dy_SF.astype(jnp.float32))]
    found = [each.astype(jnp.float32) for each in found]
    # one rounding of a float32 sum
    chex.assert_trees_all_close(found, wanted, rtol=1e-5 if dtype == "float32" else 2**-8, atol=1e-5)


@pytest.mark.parametrize("product", GROUPED_PRODUCTS.values(), ids=GROUPED_PRODUCTS)
def test_rows_beyond_the_groups_count_for_nothing(product):
    x_SD, w_LDF = jnp.ones((ROWS, D)), jnp.ones((GROUPS, D, F))
    x_SD = x_SD.at[40:].set(jnp.nan)
    sizes = jnp.array([16, 8, 0, 16], jnp.int32)
    actual, pull = jax.vjp(lambda w: product.multiply(x_SD, w, sizes, 8), w_LDF)
    np.testing.assert_array_equal(actual[:40], D)
    (dw_LDF,) = pull(jnp.ones((ROWS, F)))
    np.testing.assert_array_equal(dw_LDF[:, 0, 0], sizes)


def test_tiles_fit_the_rows_of_a_group():
    """Padding never exceeds the rows, but where a platform has no smaller tile."""
    product = GroupedProduct(lambda *_: jnp.zeros(()), least=8, most=64)
    assert [product.tile(rows, groups=4) for rows in (0, 31, 64, 250, 10**6)] == [8, 8, 16, 32, 64]
