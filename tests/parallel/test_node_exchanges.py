"""Exchanges by way of nodes against the flat one, on eight devices that stand for 1, 2, 4 or 8 nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.all_to_all import BY_NODE, EXCHANGES
from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from tests.parallel.per_device import on_mesh

PER_NODE = [1, 2, 4, 8]
WAYS = [*((name, "cpu") for name in BY_NODE), ("halo", "tpu")]  # made of other collectives there
FLAT = Ranks(Axis.EXPERT, "cpu")


def run(body, x, expert=8, outputs=2):
    """`body` on each device's part of x [devices · …]."""
    return on_mesh(body, BATCH_SPEC, (BATCH_SPEC,) * outputs, data=8 // expert, expert=expert)(x)


@pytest.mark.parametrize("per_node", PER_NODE)
@pytest.mark.parametrize(("name", "platform"), WAYS)
def test_every_block_reaches_the_rank_it_is_stamped_for(name, platform, per_node):
    ranks = Ranks(Axis.EXPERT, platform, per_node)

    def body(x):
        me = jax.lax.axis_index(Axis.EXPERT)
        sent = jnp.stack([jnp.stack([me, jnp.int32(to)]) for to in range(8)])  # sender, receiver
        return EXCHANGES[name](sent, ranks)[None], EXCHANGES[name](EXCHANGES[name](sent, ranks), ranks)[None]

    received, back = run(body, jnp.zeros(8))
    for rank in range(8):
        np.testing.assert_array_equal(received[rank], [(source, rank) for source in range(8)], err_msg=f"at {rank}")
        np.testing.assert_array_equal(back[rank], [(rank, to) for to in range(8)], err_msg=f"back at {rank}")


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize(("name", "platform"), WAYS)
def test_groups_of_other_data_ranks_do_not_mix(name, platform, per_node):
    """The expert axis has four ranks here, twice."""
    ranks = Ranks(Axis.EXPERT, platform, per_node)
    x = jnp.arange(8 * 4 * 3).reshape(32, 3)
    by_other, by_flat = run(lambda x: (EXCHANGES[name](x, ranks), EXCHANGES["flat"](x, FLAT)), x, expert=4)
    np.testing.assert_array_equal(by_other, by_flat)


DTYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8]


def payload(dtype, random):
    """Blocks of a random shape, perhaps without elements, of NaN, infinities and -0, too; some are all zeros."""
    shape = (64, *random.integers(0, 5, size=random.integers(0, 3)))
    x = np.asarray(random.normal(size=shape) * 100).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        special = random.choice(np.array([np.nan, -np.inf, -0.0, np.inf], dtype), size=shape)
        x = np.where(random.random(shape) < 0.2, special, x)
    keep = random.random((64, *(1 for _ in shape[1:]))) < 0.6
    return np.where(keep, x, np.zeros((), dtype))


@pytest.mark.parametrize("per_node", PER_NODE)
@pytest.mark.parametrize(("name", "platform"), WAYS)
def test_it_moves_the_same_bits_as_flat(name, platform, per_node):
    """Sums in the place of choices would lose -0, products NaN and infinities."""
    ranks, random = Ranks(Axis.EXPERT, platform, per_node), np.random.default_rng(per_node)
    xs = [np.zeros((64, 3, 0), jnp.bfloat16), *(payload(dtype, random) for dtype in 2 * DTYPES)]

    def both(*xs):
        return [(EXCHANGES[name](x, ranks), EXCHANGES["flat"](x, FLAT)) for x in xs]

    for by_other, by_flat in on_mesh(both, BATCH_SPEC, BATCH_SPEC, data=1, expert=8)(*xs):
        assert (by_other.dtype, by_other.shape) == (by_flat.dtype, by_flat.shape)
        np.testing.assert_array_equal(np.asarray(by_other).view(np.uint8), np.asarray(by_flat).view(np.uint8))


@pytest.mark.parametrize("per_node", PER_NODE)
@pytest.mark.parametrize(("name", "platform"), WAYS)
def test_it_has_the_gradient_that_jax_gives_flat(name, platform, per_node):
    ranks, dtype = Ranks(Axis.EXPERT, platform, per_node), jnp.bfloat16 if per_node == 2 else jnp.float32
    x = jax.random.normal(jax.random.key(per_node), (64, 3), dtype)

    def body(x):
        def loss(x, exchange):
            weight = 1.0 + jax.lax.axis_index(BATCH_AXES) + jnp.arange(24.0).reshape(8, 3)
            return jnp.sum(jnp.sin(exchange(x)).astype(jnp.float32) * weight)

        return (
            jax.grad(loss)(x, lambda x: EXCHANGES[name](x, ranks)),
            jax.grad(loss)(x, lambda x: jax.lax.all_to_all(x, Axis.EXPERT, 0, 0, tiled=True)),
        )

    by_other, by_flat = run(body, x)
    assert by_other.dtype == x.dtype
    np.testing.assert_array_equal(by_other, by_flat)


@pytest.mark.parametrize(("name", "platform"), WAYS)
def test_its_own_derivative_is_the_transpose_that_is_declared(name, platform):
    """Every phase differentiated by JAX: the same as sending the cotangent the same way."""
    ranks = Ranks(Axis.EXPERT, platform, 4)
    x = jax.random.normal(jax.random.key(0), (64, 3))

    def body(x):
        exchange = EXCHANGES[name]
        _, pullback = jax.vjp(lambda x: exchange.finish(exchange.start(x, ranks), ranks), x)
        return *pullback(x * x), exchange(x * x, ranks)

    by_jax, declared = run(body, x)
    np.testing.assert_array_equal(by_jax, declared)
