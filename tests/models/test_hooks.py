"""Hooks: what travels comes back within its format's error, and gradients go straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.models.dispatch import TokenExchange
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.hooks import HOOKS
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.parallel.tensor_dispatch import DispatchRoute
from tests.parallel.per_device import on_mesh

FORMATS = ["bf16", "fp8"]
SMALLEST = np.finfo(np.float32).tiny


def rows_of(seed, dtype=np.float32, shape=(64, 3, 5, 24)):
    """Rows of very different size, with numbers of very different size in each; some rows and numbers are 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-14, 1, shape)
    x *= 2.0 ** rng.integers(-60, 60, (*shape[:-1], 1)) * (rng.random((*shape[:-1], 1)) > 0.2)
    return (x * (rng.random(shape) > 0.1)).astype(dtype)


def bound(name, x):
    """The largest error of each number: half a step of its mantissa, or of the smallest numbers of its row."""
    x = np.abs(x)
    if name == "bf16":
        return x * 2.0**-8 + SMALLEST
    scale = np.max(x, axis=-1, keepdims=True) / 448
    return np.maximum(x * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6) + SMALLEST


def dispatched(x, route, name):
    return TokenExchange("dispatch", route, HOOKS[name]).run(ExpertRows(x)).rows


def around(name, algorithm, x, dx):
    """What the exchange brings, and its gradient for the cotangents `dx`."""
    route = DispatchRoute(algorithm, Ranks(Axis.EXPERT, "cpu", 2))

    def body(x, dx):
        received, pullback = jax.vjp(lambda x: dispatched(x, route, name), x)
        return received, *pullback(dx)

    return jax.device_get(on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=1, expert=8)(x, dx))


@pytest.mark.parametrize("algorithm", EXCHANGES)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_arrive_within_the_formats_error_and_cotangents_as_bfloat16(name, algorithm):
    x, dx = rows_of(0), rows_of(1)
    expected, _ = around("none", "flat", x, dx)
    received, gradient = around(name, algorithm, x, dx)
    assert received.shape == x.shape
    assert received.dtype == x.dtype
    error = np.abs(received - expected)
    assert (error <= bound(name, expected)).all()
    assert (error > bound(name, expected) / 2).any(), "nothing was rounded"
    assert not received[expected == 0].any()
    rounded = np.asarray(dx.astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(gradient, around("none", "flat", x, rounded)[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back_in_their_shape_and_type(name, dtype):
    for shape in [(2, 3), (4, 2, 5, 16), (4, 0, 16)]:
        x = jnp.asarray(rows_of(2, shape=shape), dtype)
        for hook in HOOKS[name].dispatch, HOOKS[name].combine_backward:
            back = hook.decode(hook.encode(x), x.dtype)
            assert (back.shape, back.dtype) == (x.shape, x.dtype)
    if dtype == jnp.bfloat16:
        assert (HOOKS["bf16"].dispatch.decode(HOOKS["bf16"].dispatch.encode(x), dtype) == x).all()


def test_a_row_of_tiny_numbers_stays_tiny_and_a_broken_one_is_seen():
    rows = np.array([[1e-44, 0], [1e38, -3e38], [np.nan, 1], [1, np.inf]], np.float32)
    hook = HOOKS["fp8"].dispatch
    back = np.asarray(hook.decode(hook.encode(jnp.asarray(rows)), jnp.float32))
    assert (np.abs(back[0]) <= SMALLEST).all()
    np.testing.assert_allclose(back[1], rows[1], rtol=2.0**-4)
    assert np.isnan(back[2:]).any(axis=-1).all()


@pytest.mark.parametrize(("name", "kind", "row_bytes"), [("none", "f32", 96), ("bf16", "u16", 48), ("fp8", "u8", 28)])
def test_the_compiled_exchange_sends_as_many_bytes_as_the_format_has(name, kind, row_bytes):
    route = DispatchRoute("flat", Ranks(Axis.EXPERT, "cpu"))

    def body(x):
        return dispatched(2 * x, route, name) + 1

    x = jax.ShapeDtypeStruct((64, 3, 24), jnp.float32)
    text = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=1, expert=8).lower(x).compile().as_text()
    (line,) = [line for line in text.splitlines() if " all-to-all(" in line]
    item = {"f32": 4, "u16": 2, "u8": 1}[kind]
    assert line.count(f"{kind}[1,3,{row_bytes // item}]") >= 8, line


def test_without_hooks_the_exchange_is_the_bare_one():
    ranks = Ranks(Axis.EXPERT, "cpu")
    x = jax.ShapeDtypeStruct((64, 3, 24), jnp.float32)

    def program(body):
        spec = PartitionSpec((Axis.DATA, Axis.EXPERT))
        return on_mesh(body, spec, spec, data=1, expert=8).lower(x).as_text()

    bare = program(lambda x: EXCHANGES["flat"](x, ranks))
    assert program(lambda x: dispatched(x, DispatchRoute("flat", ranks), "none")) == bare
