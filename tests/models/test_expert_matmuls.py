"""Experts' products of 8-bit operands against a slow reference: values and gradients of every form of product."""

from collections import Counter

import autograd.numpy as anp
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers import DISPATCHERS
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.expert_matmuls import expert_product
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.models.layers import EACH, ONE
from moe_jax.parallel.eight_bits import quantize
from moe_jax.step.scheduled.jaxpr_utils import inlined
from tests.numpy_gradients import value_and_grad
from tests.references import fp8_product, to_fp8

L, ROWS, D, F = 3, 16, 10, 6
FP8 = MoEConfig(num_experts=L, expert_matmuls="fp8")
KINDS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def numbers(seed, *shape):
    """Rows of very different size, with numbers of very different size in each; some rows and numbers are 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-18, 1, shape)
    x *= 2.0 ** rng.integers(-20, 20, (*shape[:-1], 1)) * (rng.random((*shape[:-1], 1)) > 0.1)
    return (x * (rng.random(shape) > 0.1)).astype(np.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [-1, (-2, -1)])
def test_numbers_are_rounded_to_the_nearest_of_8_bits(name, dtype, axis):
    x = jnp.asarray(numbers(0, 64, 8, 24), dtype)
    found = jax.jit(lambda x: quantize(x, KINDS[name], axis))(x)
    assert found.numbers.dtype == KINDS[name]
    assert found.scale.dtype == dtype
    back = found.wide() * found.scale
    np.testing.assert_array_equal(back.astype(jnp.float32), to_fp8(x, name, axis))
    wide = np.asarray(x, np.float32)
    half_a_step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[name]
    smallest = np.abs(wide).max(axis, keepdims=True) * 2.0**-17
    assert (np.abs(back.astype(jnp.float32) - wide) <= np.maximum(half_a_step * np.abs(wide), smallest)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_reported_and_no_other(bad):
    x = np.ones((3, 4), np.float32)
    x[1, 2] = bad
    found = quantize(jnp.asarray(x), jnp.float8_e4m3fn, -1)
    assert np.isnan(found.wide() * found.scale).tolist() == [[False] * 4, [True] * 4, [False] * 4]


def by_reference(x, w, dy, groups):
    """One group of rows after another, and the gradients."""

    def weighed(operands):
        x, w = operands
        y = anp.concatenate([fp8_product(x[rows], w[number]) for number, rows in enumerate(groups)])
        return (y * np.asarray(dy, np.float64)).sum(), y

    (_, y), grads = value_and_grad(weighed)((x, w))
    return y, *grads


def with_gradients(function, x, w, dy):
    y, pull = jax.vjp(function, x, w)
    return y, *pull(jnp.asarray(dy, y.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["one", "each", "ragged", "blocks"])
def test_products_and_gradients_are_those_of_rounded_operands(name, dtype):
    x, w, dy = (jnp.asarray(numbers(i, *shape), dtype) for i, shape in enumerate([(L * ROWS, D), (L, D, F), (48, F)]))
    sizes = {"one": [L * ROWS], "each": [ROWS] * L}.get(name, [24, 0, 24])
    groups = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    w = w[: len(sizes)]

    def fast(x, w):
        if name == "one":
            return expert_product(ONE, FP8).multiply(x, w[0])
        if name == "each":
            return expert_product(EACH, FP8).multiply(x.reshape(L, ROWS, D), w).reshape(-1, F)
        product = expert_product(GROUPED_PRODUCTS["tpu"][name].of(jnp.array(sizes, jnp.int32), len(x), 8), FP8)
        return product.multiply(x, w, *product.groups)

    found = [each.astype(jnp.float32) for each in jax.jit(lambda *a: with_gradients(fast, *a))(x, w, dy)]
    expected = by_reference(x, w, dy, groups)
    # sums in another order; in bfloat16 their result is rounded
    for one, other in zip(found, expected, strict=True):
        largest = np.abs(other).max(axis=-1, keepdims=True)
        assert (np.abs(one - other) <= largest * (1e-5 if dtype == "float32" else 2**-7)).all()


def test_no_row_depends_on_its_neighbours():
    x, w = jnp.asarray(numbers(0, L, ROWS, D)), jnp.asarray(numbers(1, L, D, F))
    multiply = jax.jit(expert_product(EACH, FP8).multiply)
    whole = multiply(x, w)
    np.testing.assert_array_equal(multiply(x[:, :8], w), whole[:, :8])
    chex.assert_trees_all_equal(multiply(x.at[:, 8:].set(1e6), w)[:, :8], whole[:, :8])
    np.testing.assert_array_equal(multiply(x[1:], w[1:]), whole[1:])


def test_all_products_but_weight_gradients_multiply_what_is_cast_from_8_bits():
    """As XLA:GPU looks for them: a cast, then at most a change of shape, then the product."""
    params, sent = {"up": jnp.ones((L, D, F)), "down": jnp.ones((L, F, D))}, jnp.ones((1, L, ROWS, D))

    def loss(params, sent):
        return DISPATCHERS["capacity"].experts(params, ExpertRows(sent), FP8, GROUPED_PRODUCTS["cpu"]["blocks"]).sum()

    eqns = inlined(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, sent)).jaxpr.eqns
    maker = {var: eqn for eqn in eqns for var in eqn.outvars}

    def cast_from(var):
        while (eqn := maker[var]).primitive.name in ("transpose", "reshape"):
            (var,) = eqn.invars
        return eqn.invars[0].aval.dtype.name if eqn.primitive.name == "convert_element_type" else None

    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    found = Counter(tuple(sorted(map(str, map(cast_from, eqn.invars)))) for eqn in products)
    e4m3, e5m2 = (jnp.dtype(kind).name for kind in KINDS.values())
    assert found == {(e4m3, e4m3): 2, (e4m3, e5m2): 2, ("None", "None"): 2}
