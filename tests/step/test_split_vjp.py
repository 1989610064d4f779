"""A pullback in two parts: together the whole, nothing twice, and only products of weights wait."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers import DISPATCHERS
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.step.scheduled.split_vjp import SplitBackward, differentiate

ROWS, WIDTH = 6, 4


@jax.custom_vjp
def clipped(x: jax.Array, bound: jax.Array) -> jax.Array:
    return jnp.clip(x, -bound, bound)


clipped.defvjp(lambda x, bound: (clipped(x, bound), (x, bound)), lambda saved, dy: (dy * saved[1], dy.sum()))


def dense(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["a"]) @ w["b"] + w["c"]


def nested_jit(w: Any, x: jax.Array) -> jax.Array:
    return jax.jit(lambda v: jax.jit(dense)(w, v) + x)(x * 2)


def recomputed(w: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(dense)(w, x) + jax.checkpoint(dense, policy=jax.checkpoint_policies.dots_saveable)(w, x)


def own_rule(w: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda w, x: clipped(x @ w["a"], w["c"][0]) @ w["b"])(w, x)


def branches(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, lambda: dense(w, x), lambda: x @ w["b"]) @ w["a"]


def loop(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda y, _: (dense(w, y), None), x, length=3)[0]


def as_is(x: jax.Array) -> jax.Array:
    return x


FUNCTIONS = [dense, nested_jit, recomputed, own_rule, branches, loop]


def example(function: Callable[..., Any]) -> tuple[Callable[[list[jax.Array]], Any], list[jax.Array]]:
    """A pullback and cotangents for it."""
    keys = jax.random.split(jax.random.key(0), 4)
    w = {name: jax.random.normal(key, (WIDTH, WIDTH)) for name, key in zip("ab", keys, strict=False)}
    w["c"] = jnp.linspace(0.5, 1, WIDTH)
    y, pullback = differentiate(function, w, jax.random.normal(keys[2], (ROWS, WIDTH)))
    return pullback, [jax.random.normal(keys[3], y.shape)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_parts_together_are_the_pullback(function):
    pullback, cotangents = example(function)

    @jax.jit
    def in_parts(cotangents: list[jax.Array]) -> Any:
        split = SplitBackward(pullback, cotangents)
        inputs = split.inputs()
        return split.weights(as_is), inputs

    chex.assert_trees_all_close(in_parts(cotangents), jax.jit(pullback)(cotangents), rtol=1e-6, atol=1e-6)


def test_leaves_without_gradients_pass_through():
    inputs = {"x": jnp.ones((ROWS, WIDTH)), "sizes": jnp.arange(3)}
    result, pullback = differentiate(lambda w, t: {"y": t["x"] @ w, "sizes": t["sizes"] + 1}, jnp.eye(WIDTH), inputs)
    assert result["sizes"].tolist() == [1, 2, 3]
    split = SplitBackward(pullback, [jnp.ones((ROWS, WIDTH))])
    (dx,) = split.inputs()
    assert dx.shape == (ROWS, WIDTH)
    assert (split.weights(as_is) == ROWS).all()


@pytest.mark.parametrize("function", [dense, nested_jit, recomputed, own_rule])
def test_no_weight_gradient_exists_before_what_it_is_tied_to(function):
    """Tied to something broken, each of them is broken: none was made of nothing but what is not tied."""
    pullback, cotangents = example(function)
    split = SplitBackward(pullback, cotangents)
    inputs = split.inputs()
    broken = split.weights(lambda x: x * jnp.nan)
    assert all(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(broken))
    assert not any(jnp.isnan(leaf).any() for leaf in inputs)


def operations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """All operations, those of calls in place of the call, without barriers."""
    found: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "remat2", "checkpoint"):
            body = eqn.params["jaxpr"]
            found += operations(body.jaxpr if isinstance(body, ClosedJaxpr) else body)
        elif eqn.primitive.name != "optimization_barrier":
            found.append(eqn)
    return found


def kinds(eqns: list[JaxprEqn]) -> Counter[str]:
    """How often each operation appears, by name and shape of its results."""
    return Counter(f"{eqn.primitive} {[var.aval.shape for var in eqn.outvars]}" for eqn in eqns)


def both_parts(pullback: Callable[..., Any], cotangents: list[jax.Array]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The operations that each of the two parts runs."""

    def run(cotangents: list[jax.Array], *, weights: bool) -> Any:
        split = SplitBackward(pullback, cotangents)
        inputs = split.inputs()
        return (inputs, split.weights(as_is)) if weights else inputs

    # tracing keeps what nothing needs, so the first trace is the beginning of the second
    first, both = (
        operations(jax.make_jaxpr(lambda ct, w=w: run(ct, weights=w))(cotangents).jaxpr) for w in (False, True)
    )
    return first, both[len(first) :]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_operation_runs_in_exactly_one_part(function):
    pullback, cotangents = example(function)
    first, second = both_parts(pullback, cotangents)
    whole = operations(jax.make_jaxpr(pullback)(cotangents).jaxpr)
    assert kinds(first) + kinds(second) == kinds(whole)


def products(eqns: list[JaxprEqn]) -> Counter[tuple[int, ...]]:
    """Shapes of the results of matrix products."""
    return Counter(eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "dot_general")


@pytest.mark.parametrize(
    ("function", "layers", "products_again"), [(dense, 1, 0), (nested_jit, 1, 0), (recomputed, 2, 1)]
)
def test_products_for_weights_wait(function, layers, products_again):
    """Otherwise nothing would be left to fill the waits of compute with."""
    pullback, cotangents = example(function)
    first, second = both_parts(pullback, cotangents)
    assert products(second) == {(WIDTH, WIDTH): 2 * layers}
    assert products(first) == {(ROWS, WIDTH): 2 * layers + products_again}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("matmuls", ["compute_dtype", "fp8"])
def test_experts_leave_all_their_weight_gradients_for_later(matmuls, remat):
    held, slots, hidden = 2, 5, 3
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"gate": (held, WIDTH, hidden), "up": (held, WIDTH, hidden), "down": (held, hidden, WIDTH)}
    params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    rows = jax.random.normal(next(keys), (1, held, slots, WIDTH))
    moe = MoEConfig(num_experts=held, expert_matmuls=matmuls)

    def experts(params: Any, rows: jax.Array) -> jax.Array:
        return DISPATCHERS["capacity"].experts(params, ExpertRows(rows), moe, GROUPED_PRODUCTS["cpu"]["blocks"])

    result, pullback = differentiate(jax.checkpoint(experts) if remat else experts, params, rows)
    first, second = both_parts(pullback, [jax.random.normal(next(keys), result.shape)])
    assert sum(products(second).values()) == 3
    assert sum(products(first).values()) == (5 if remat else 3)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_value_can_be_replaced(recompute):
    """By NaN here: it reaches the input gradients, and no weight gradient."""

    def product(w: Any, x: jax.Array) -> jax.Array:
        return x @ w

    w, x, dy = jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)), jnp.ones((ROWS, WIDTH))

    def gradients(w: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        _, pullback = differentiate(jax.checkpoint(product) if recompute else product, w, x)
        split = SplitBackward(pullback, [dy], [(w, w * jnp.nan)])
        return split.inputs(), split.weights(lambda x: x)

    (dx,), dw = jax.jit(gradients)(w, x, dy)
    assert jnp.isnan(dx).all()
    chex.assert_trees_all_close(dw, x.T @ dy)


def test_what_a_pullback_does_not_keep_cannot_be_replaced():
    def gradients(w: jax.Array, x: jax.Array) -> Any:
        _, pullback = differentiate(lambda w, x: x + w, w, x)
        return SplitBackward(pullback, [x], [(w, w)]).inputs()

    with pytest.raises(AssertionError, match="does not keep"):
        jax.jit(gradients)(jnp.ones(WIDTH), jnp.ones(WIDTH))


@pytest.mark.parametrize("least", [False, True])
def test_operations_keep_their_scopes(least):
    """Profiles show them, and reports distinguish collectives by them."""

    def scoped(w: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("inside"):
            return jax.jit(jnp.tanh)(x @ w)

    def gradients(w: jax.Array, x: jax.Array) -> Any:
        with jax.named_scope("task"):
            y, pullback = differentiate(scoped, w, x, min_cut=least)
        with jax.named_scope("back"):
            split = SplitBackward(pullback, [y])
            return split.inputs(), split.weights(as_is)

    program = jax.jit(gradients).lower(jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))).as_text(debug_info=True)
    products = {line.split('"')[1] for line in program.splitlines() if "/dot_general" in line}
    assert {name.split("/")[1] for name in products} == {"task", "back"}
    assert all("inside" in name for name in products)
