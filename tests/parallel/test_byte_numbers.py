"""Bytes as numbers have all bits of what they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.byte_numbers import from_byte_numbers, to_byte_numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_bits_come_back(dtype: str) -> None:
    """Any bits, those of infinities and of what is no number, too."""
    rank_Pn = np.random.default_rng(0).integers(2**32, size=(3, 1000), dtype=np.uint32)
    rank_Pn[0, :256] = np.arange(256) * 0x01010101
    byte_Pn = jax.vmap(lambda x_n: to_byte_numbers(x_n, dtype))(jnp.asarray(rank_Pn.view(np.float32)))
    assert (byte_Pn.shape, str(byte_Pn.dtype)) == ((3, 4000), dtype)
    assert (byte_Pn.min(), byte_Pn.max()) == (0, 255)
    assert np.asarray(jax.jit(from_byte_numbers)(byte_Pn)).tobytes() == rank_Pn.tobytes()
