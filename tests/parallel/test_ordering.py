"""`depend_on`: changes no bit, and orders collectives in the optimised program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.mesh import BATCH_AXES
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from tests.parallel.per_device import on_mesh

DEPENDENCIES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_no_bit_changes_whatever_the_dependency_holds(dtype, dependency):
    values = [-0.0, 0.0, np.nan, np.inf, -np.inf, 3.0] if jnp.issubdtype(dtype, jnp.floating) else [0, 1, 255]
    wait = jax.jit(lambda x, d: depend_on(x, d, "cpu"))
    for x in (jnp.array([[value, 5]], dtype) for value in values):
        ordered = wait(x, jnp.full((2, 1, 3), dependency))
        np.testing.assert_array_equal(np.asarray(ordered).view(np.uint8), np.asarray(x).view(np.uint8))


@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_a_slice_at_an_index_that_is_computed_waits_unchanged(dependency):
    """XLA joins it with a slice that the dependency is written by."""

    def part(x, start):
        return jax.lax.dynamic_slice(x, (start, start), (2, 3))

    x, start = jnp.arange(1.0, 41.0).reshape(4, 10), jnp.int32(1)
    wait = jax.jit(lambda x, start, d: depend_on(part(x, start), d, "cpu"))
    np.testing.assert_array_equal(wait(x, start, jnp.full(3, dependency)), part(x, start))


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.bfloat16])
def test_the_dependency_may_have_any_dtype_and_rank(dtype):
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(lambda d: depend_on(x, d, "cpu"))(jnp.ones((), dtype)), x)


def test_of_a_tree_every_array_waits_that_has_elements():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": (jnp.float32(-0.0), jnp.zeros((0, 2)), jnp.full((1, 1), 7))}
    for dependency, barriers in ((jnp.ones(2), 3), (jnp.ones((2, 0)), 0)):
        text = jax.jit(lambda x, d: depend_on(x, d, "tpu")).lower(tree, dependency).as_text()
        assert text.count("optimization_barrier") == barriers
        waited = jax.jit(lambda x, d: depend_on(x, d, "cpu"))(tree, dependency)
        for found, expected in zip(jax.tree.leaves(waited), jax.tree.leaves(tree), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def two_sums(ordered):
    """The optimised program of two sums over all devices that do not depend on each other by their data."""

    def body(x, y):
        first = jax.lax.psum(x * 2, BATCH_AXES)
        other = depend_on(y, first, "cpu") if ordered else y
        return first, jax.lax.psum(other, BATCH_AXES)

    program = on_mesh(body, (BATCH_SPEC, BATCH_SPEC), (REPLICATED, REPLICATED), data=2, expert=4)
    return program.lower(jnp.ones((8, 4)), jnp.ones((16,))).compile().as_text()


def test_on_cpu_the_order_survives_the_compiler():
    """XLA's combiner merges sums that do not depend on each other, and keeps those that do."""
    assert two_sums(ordered=False).count(" all-reduce(") == 1
    assert two_sums(ordered=True).count(" all-reduce(") == 2


def test_elsewhere_it_is_a_barrier_over_both():
    text = jax.jit(lambda x, d: depend_on(x, d, "tpu")).lower(jnp.ones(3), jnp.ones(2)).as_text()
    assert "optimization_barrier" in text


def test_gradients_pass_through_to_x_alone():
    def loss(x, d):
        return jnp.sum(jnp.sin(depend_on(x, d, "cpu")))

    x, d = jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([4.0])
    by_x, by_d = jax.grad(loss, argnums=(0, 1))(x, d)
    np.testing.assert_array_equal(by_x, jnp.cos(x))
    np.testing.assert_array_equal(by_d, [0.0])
