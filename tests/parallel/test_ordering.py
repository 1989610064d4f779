"""`after`: changes no bit, and orders collectives in the optimised program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.mesh import BATCH_AXES
from moe_jax.parallel.ordering import after, apart, hold
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from tests.parallel.per_device import on_mesh

DEPENDENCIES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_no_bit_changes_whatever_the_dependency_holds(dtype, dependency):
    values = [-0.0, 0.0, np.nan, np.inf, -np.inf, 3.0] if jnp.issubdtype(dtype, jnp.floating) else [0, 1, 255]
    wait = jax.jit(lambda x, d: after(x, d, "cpu"))
    for x in (jnp.array([[value, 5]], dtype) for value in values):
        ordered = wait(x, jnp.full((2, 1, 3), dependency))
        np.testing.assert_array_equal(np.asarray(ordered).view(np.uint8), np.asarray(x).view(np.uint8))


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.bfloat16])
def test_the_dependency_may_have_any_dtype_and_rank(dtype):
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(lambda d: after(x, d, "cpu"))(jnp.ones((), dtype)), x)


def two_sums(ordered):
    """The optimised program of two sums over all devices that do not depend on each other by their data."""

    def body(x, y):
        first = jax.lax.psum(x * 2, BATCH_AXES)
        other = after(y, first, "cpu") if ordered else y
        return first, jax.lax.psum(other, BATCH_AXES)

    program = on_mesh(body, (BATCH_SPEC, BATCH_SPEC), (REPLICATED, REPLICATED), data=2, expert=4)
    return program.lower(jnp.ones((8, 4)), jnp.ones((16,))).compile().as_text()


def test_on_cpu_the_order_survives_the_compiler():
    """XLA's combiner merges sums that do not depend on each other, and keeps those that do."""
    assert two_sums(ordered=False).count(" all-reduce(") == 1
    assert two_sums(ordered=True).count(" all-reduce(") == 2


def test_elsewhere_it_is_a_barrier_over_both():
    text = jax.jit(lambda x, d: after(x, d, "tpu")).lower(jnp.ones(3), jnp.ones(2)).as_text()
    assert "optimization_barrier" in text


def test_gradients_pass_through_to_x_alone():
    def loss(x, d):
        return jnp.sum(jnp.sin(after(x, d, "cpu")))

    x, d = jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([4.0])
    by_x, by_d = jax.grad(loss, argnums=(0, 1))(x, d)
    np.testing.assert_array_equal(by_x, jnp.cos(x))
    np.testing.assert_array_equal(by_d, [0.0])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, np.inf, np.nan])
def test_holding_and_setting_apart_change_no_bit_and_no_gradient(value):
    x = jnp.full((3, 40), value).at[1, 1].set(-0.0)

    def both(x, held):
        return apart(hold(x, held, "cpu"), "cpu")

    np.testing.assert_array_equal(np.asarray(jax.jit(both)(x, 2 * x)).view(np.uint8), np.asarray(x).view(np.uint8))
    by_x, by_held = jax.grad(lambda x, held: (both(x, held) * 3).sum(), argnums=(0, 1))(jnp.ones((3, 40)), x)
    np.testing.assert_array_equal(by_x, jnp.full((3, 40), 3.0))
    np.testing.assert_array_equal(by_held, jnp.zeros((3, 40)))


def optimised(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_what_is_held_is_read_whole_and_late():
    """A slice of it would be read at once, or computed again, and its memory given away."""

    def held_until_product(x, y):
        sent = 2 * x
        return hold(y @ y, sent, "cpu"), sent.sum()

    text = optimised(held_until_product, jnp.ones((50, 70)), jnp.ones((64, 64)))
    branches = [line for line in text.splitlines() if " conditional(" in line]
    assert len(branches) == 1
    assert text.count("f32[50,70]{1,0}) tuple(") >= 1  # the branch's operand


def test_apart_puts_a_product_before_what_follows():
    """XLA:CPU moves only products to another thread; without one, a collective would stay with the work around it."""
    x = jnp.ones((16, 16))
    assert "dot(" not in optimised(lambda x: jnp.sin(x) + 1, x)
    assert "f32[8,8]{1,0} dot(" in optimised(lambda x: apart(jnp.sin(x), "cpu") + 1, x)


def test_elsewhere_nothing_is_held_or_set_apart():
    x = jnp.ones((16, 16))
    for platform in ("tpu", "cuda"):
        text = jax.jit(lambda x, p=platform: apart(hold(x, 2 * x, p), p)).lower(x).as_text()
        assert "stablehlo.case" not in text
        assert "dot_general" not in text
