"""Products of float32 are exact where a config asks for float32."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.models.precision import exact_products


@pytest.mark.parametrize(
    ("dtype", "platform", "is_exact"), [("float32", "tpu", True), ("bfloat16", "tpu", False), ("float32", "cpu", False)]
)
def test_tpus_are_asked_for_exact_products_of_float32(dtype: str, platform: str, is_exact: bool) -> None:
    def loss(x: jax.Array) -> jax.Array:
        with exact_products(dtype, platform):
            return (x @ x).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 2))))
    assert text.count("HIGHEST") == (0 if not is_exact else text.count("dot_general") * 2)
