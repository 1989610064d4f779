"""What tasks keep: the least there is to keep, and the same gradients."""

import functools
from collections.abc import Callable
from itertools import combinations
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var

from moe_jax.config import ModelConfig
from moe_jax.models import attention
from moe_jax.models.attention import grouped
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.layers import mlp, rms_norm
from moe_jax.parallel import context
from moe_jax.step.scheduled.jaxpr_utils import inlined
from moe_jax.step.scheduled.min_cut_remat import cost, smallest_cut
from moe_jax.step.scheduled.split_vjp import SplitBackward, differentiate

ROWS, WIDTH = 16, 64


def norm(w: Any, x: jax.Array) -> jax.Array:
    return rms_norm(x, w["scale"], 1e-6)


def softmax(w: Any, x: jax.Array) -> jax.Array:
    scores = (x @ w["a"]).astype(jnp.float32)
    return jax.nn.softmax(scores).astype(x.dtype) @ w["b"]


def gated(w: Any, x: jax.Array) -> jax.Array:
    return mlp({"gate": w["a"], "up": w["b"], "down": w["a"]}, x)


def shared(w: Any, x: jax.Array) -> jax.Array:
    y = x @ w["a"]
    return jnp.tanh(y) * jnp.exp(y) + jnp.sin(y.sum(-1, keepdims=True)) * x.astype(jnp.float32).astype(x.dtype)


FUNCTIONS = [norm, softmax, gated, shared]


def example() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    w = {name: jax.random.normal(key, (WIDTH, WIDTH), jnp.bfloat16) / 8 for name, key in zip("ab", keys, strict=False)}
    w["scale"] = jnp.linspace(0.5, 1, WIDTH, dtype=jnp.bfloat16)
    return w, jax.random.normal(keys[2], (ROWS, WIDTH), jnp.bfloat16)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_other_choice_is_smaller(function: Callable[..., Any]) -> None:
    """All of them, tried one after another."""
    results = 0

    def forward(w: Any, x: jax.Array) -> list[jax.Array]:
        nonlocal results
        y, pullback = jax.vjp(function, w, x)
        results = len(jax.tree.leaves(y))
        return [*jax.tree.leaves(y), *jax.tree.leaves(pullback)]

    jaxpr = inlined(jax.make_jaxpr(forward)(*example())).jaxpr
    wanted = [var for var in jaxpr.outvars[results:] if isinstance(var, Var)]
    written = [var for var in jaxpr.outvars[:results] if isinstance(var, Var)]
    maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def total(choice: Any) -> int:
        return sum(cost(var, maker, written) for var in choice)

    hard = {"dot_general", "reduce_sum", "reduce_max"}
    names = {eqn.primitive.name for eqn in jaxpr.eqns}

    def suffices(choice: Any) -> bool:
        made = set(choice)
        for eqn in jaxpr.eqns:
            parts = [var for var in eqn.invars if isinstance(var, Var)]
            if eqn.primitive.name not in hard and made.issuperset(parts):
                made.update(eqn.outvars)
        return made.issuperset(wanted)

    assert names & hard
    chosen = smallest_cut(jaxpr.eqns, wanted, written)
    assert suffices(chosen)
    fixed = {var for var in jaxpr.invars if var in wanted}  # nothing makes those
    others = [var for var in {*jaxpr.invars, *maker} - fixed if cost(var, maker, written) < total(chosen)]
    for size in range(len(chosen) - len(fixed) + 1):
        for choice in combinations(others, size):
            if total(fixed) + total(choice) < total(chosen):
                assert not suffices(fixed.union(choice))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_those_of_the_usual_pullback(function: Callable[..., Any]) -> None:
    def gradients(w: Any, x: jax.Array, dy: jax.Array, *, min_cut: bool) -> Any:
        y, pullback = differentiate(function, w, x, min_cut=min_cut)
        split = SplitBackward(pullback, [dy])
        return y, split.inputs(), split.weights(lambda x: x)

    w, x = example()
    dy = jax.random.normal(jax.random.key(1), (ROWS, WIDTH), jnp.bfloat16)
    least, usual = (gradients(w, x, dy, min_cut=least) for least in (True, False))
    chex.assert_trees_all_equal(least, usual)  # operation by operation: no compiler rounds elsewhere


def kept_bytes(function: Callable[..., Any], weights: Any, x: jax.Array, *, min_cut: bool) -> list[int]:
    """Sizes of what a pullback keeps, weights aside."""
    kept: list[jax.Array] = []

    def keep(weights: Any, x: jax.Array) -> None:
        given = set(map(id, jax.tree.leaves(weights)))
        leaves = jax.tree.leaves(differentiate(function, weights, x, min_cut=min_cut)[1])
        kept.extend({id(leaf): leaf for leaf in leaves if id(leaf) not in given}.values())

    jax.eval_shape(keep, weights, x)
    return sorted((leaf.size * leaf.dtype.itemsize for leaf in kept), reverse=True)


def test_attention_keeps_one_value_for_each_pair_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "tp_all_gather", lambda x, dim: x)  # there are no other ranks outside `shard_map`
    monkeypatch.setattr(attention, "tp_reduce_scatter", lambda x, dim: x)
    for module in (grouped, context):
        monkeypatch.setattr(module, "context_ranks", lambda: 1)
    model = ModelConfig(hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2)
    tokens, width = 512, WIDTH // 2
    shapes = dict.fromkeys(("query", "key", "value"), (WIDTH, 2, width)) | {"out": (2, width, WIDTH)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()} | {"norm": jnp.ones(WIDTH)}
    pairs = 2 * tokens * tokens
    x = jnp.ones((1, tokens, WIDTH), jnp.bfloat16)
    attend = functools.partial(attention.attend, model=model, view=model.views[0], impl=AttentionImpl())
    least, usual = (kept_bytes(attend, params, x, min_cut=least) for least in (True, False))
    assert sum(size >= pairs for size in usual) > 3
    assert [size for size in least if size >= pairs] == [4 * pairs]


def test_experts_keep_their_rows_and_two_products() -> None:
    w, x = example()
    assert kept_bytes(gated, w, x, min_cut=True) == [2 * ROWS * WIDTH] * 3
    assert len(kept_bytes(gated, w, x, min_cut=False)) > 3
