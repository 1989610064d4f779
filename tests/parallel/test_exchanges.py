"""Every exchange against the flat one: bits, gradients, and the collectives that a ring becomes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from tests.parallel.per_device import on_mesh

EXCHANGE = {name: functools.partial(exchange, ranks=Ranks(Axis.EXPERT, "cpu")) for name, exchange in EXCHANGES.items()}
OTHERS = [name for name in EXCHANGE if name != "flat"]


def plain(x):
    """With the gradient that JAX gives it."""
    return jax.lax.all_to_all(x, Axis.EXPERT, 0, 0, tiled=True)


SPECIAL = jnp.array([jnp.nan, -jnp.inf, -0.0, jnp.inf], jnp.bfloat16)
PAYLOADS = {
    "float32": lambda shape, key: jax.random.normal(key, shape),
    "bfloat16 with NaN, infinities and -0": lambda shape, key: (
        jax.random.permutation(key, SPECIAL, axis=0) * jax.random.normal(key, shape, jnp.bfloat16)
    ),
    "group sizes": lambda shape, key: jax.random.randint(key, shape, 0, 100),
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("expert", [1, 2, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_it_moves_the_same_bits_as_flat(name, payload, expert):
    x = PAYLOADS[payload]((8, expert, 4), jax.random.key(expert))

    def both(x):
        return EXCHANGE["flat"](x[0])[None], EXCHANGE[name](x[0])[None]

    by_flat, by_other = on_mesh(both, BATCH_SPEC, (BATCH_SPEC, BATCH_SPEC), data=8 // expert, expert=expert)(x)
    assert by_other.dtype == by_flat.dtype
    np.testing.assert_array_equal(np.asarray(by_other).view(np.uint8), np.asarray(by_flat).view(np.uint8))


@pytest.mark.parametrize("name", OTHERS)
def test_it_has_the_gradient_of_flat_and_undoes_itself(name):
    x = jax.random.normal(jax.random.key(0), (32, 3))

    def gradient(exchange):
        def body(x):
            def loss(x):
                return jnp.sum(jnp.sin(exchange(x)) * (1.0 + jax.lax.axis_index(BATCH_AXES)))

            return jax.grad(loss)(x), exchange(exchange(x))

        return on_mesh(body, BATCH_SPEC, (BATCH_SPEC, BATCH_SPEC), data=2, expert=4)(x)

    by_flat, by_other = gradient(plain)[0], gradient(EXCHANGE[name])
    np.testing.assert_array_equal(by_other[0], by_flat)
    np.testing.assert_array_equal(by_other[1], x)


def test_ring_is_permutes_of_one_block_each():
    """Otherwise it would hide no better than the all-to-all it replaces."""
    program = on_mesh(lambda x: EXCHANGE["ring"](x), BATCH_SPEC, BATCH_SPEC, data=2, expert=4)
    text = program.lower(jnp.zeros((32, 5))).as_text()
    assert text.count("collective_permute") == 3
    assert text.count("-> tensor<1x5xf32>") >= 3
    assert "all_to_all" not in text
