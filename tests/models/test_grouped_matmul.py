"""Both grouped products against a loop over groups: values and gradients, empty groups and rows of no group."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models import grouped_matmul


def loop(x_SD, w_LDF, sizes):
    out, start = [], 0
    for w_DF, size in zip(w_LDF, sizes, strict=True):
        out.append(x_SD[start : start + size] @ w_DF)
        start += size
    return jnp.concatenate([*out, jnp.zeros((x_SD.shape[0] - start, w_LDF.shape[2]))])


@pytest.mark.parametrize("product", [grouped_matmul.ragged, grouped_matmul.blocks], ids=["ragged", "blocks"])
@pytest.mark.parametrize("sizes", [(10, 0, 70, 5), (0, 0, 0, 0), (90, 0, 0, 0), (64, 0, 1, 25)])
def test_equals_a_loop_over_groups(product, sizes):
    x_SD = jax.random.normal(jax.random.key(0), (90, 6))
    w_LDF = jax.random.normal(jax.random.key(1), (4, 6, 3))
    dy_SF = jax.random.normal(jax.random.key(2), (90, 3))
    actual, pull = jax.vjp(lambda x, w: product(x, w, jnp.array(sizes, jnp.int32)), x_SD, w_LDF)
    expected, pull_expected = jax.vjp(lambda x, w: loop(x, w, sizes), x_SD, w_LDF)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(pull(dy_SF), pull_expected(dy_SF), rtol=1e-5, atol=1e-5)
