"""Ranks, rows and the two gathers, against loops and against differentiation of one-hot products."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MoEConfig
from moe_jax.models import routing
from moe_jax.models.gates.choice import tokens_per_expert


def random_choice(tokens: int, choices: int, experts: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (7, 1, 3), (16, 2, 4), (33, 6, 8)])
def test_rank_counts_earlier_pairs_of_the_same_expert(tokens, choices, experts):
    expert_Tk = random_choice(tokens, choices, experts)
    count_E = tokens_per_expert(jnp.array(expert_Tk), experts)
    rank_Tk = routing.rank_in_expert(jnp.array(expert_Tk), count_E)
    seen = np.zeros(experts, int)
    for token in range(tokens):
        for choice in range(choices):
            expert = expert_Tk[token, choice]
            assert rank_Tk[token, choice] == seen[expert], (token, choice)
            seen[expert] += 1
    np.testing.assert_array_equal(count_E, seen)


def test_capacity_is_the_share_rounded_up_and_never_more_than_the_tokens():
    moe = MoEConfig(num_experts=8, top_k=2, capacity_factor=1.25)
    assert routing.expert_capacity(moe, 64) == 20
    assert routing.expert_capacity(moe, 65) == 21  # 20.3
    assert (
        routing.expert_capacity(MoEConfig(num_experts=10, top_k=1, capacity_factor=1.1), 100) == 11
    )  # in binary: above
    assert routing.expert_capacity(MoEConfig(num_experts=8, top_k=2, capacity_factor=100.0), 64) == 64
    assert routing.expert_capacity(MoEConfig(num_experts=8, top_k=2, capacity_factor=None), 64) == 64


def rows_and_one_hot(seed: int):
    """A random partial map of 9 tokens × 3 choices into 20 rows, and the same as a 0/1 tensor [T, k, R]."""
    rng = np.random.default_rng(seed)
    dest_index_Tk = rng.permutation(30)[:27].reshape(9, 3).astype(np.int32)
    keep_mask_Tk = dest_index_Tk < 20
    rows = routing.make_permutation(jnp.array(dest_index_Tk), jnp.array(keep_mask_Tk), 20)
    return rows, jnp.array((dest_index_Tk[..., None] == np.arange(20)) & keep_mask_Tk[..., None], jnp.float32)


def test_to_rows_and_its_gradient_equal_the_one_hot_product():
    rows, place_TkR = rows_and_one_hot(0)
    x_TD = jax.random.normal(jax.random.key(1), (9, 5))
    actual, pull = jax.vjp(lambda x: routing.to_rows(x, rows), x_TD)
    expected, pull_expected = jax.vjp(lambda x: jnp.einsum("tkr,td->rd", place_TkR, x), x_TD)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    dy_RD = jax.random.normal(jax.random.key(2), actual.shape)
    chex.assert_trees_all_close(pull(dy_RD), pull_expected(dy_RD), rtol=1e-5)


def test_from_rows_and_its_gradients_equal_the_one_hot_product():
    rows, place_TkR = rows_and_one_hot(3)
    y_RD, weight_Tk = jax.random.normal(jax.random.key(1), (20, 5)), jax.random.normal(jax.random.key(2), (9, 3))
    actual, pull = jax.vjp(lambda y, w: routing.from_rows(y, w, rows), y_RD, weight_Tk)
    expected, pull_expected = jax.vjp(lambda y, w: jnp.einsum("tkr,tk,rd->td", place_TkR, w, y), y_RD, weight_Tk)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    dout_TD = jax.random.normal(jax.random.key(4), actual.shape)
    chex.assert_trees_all_close(pull(dout_TD), pull_expected(dout_TD), rtol=1e-5, atol=1e-6)
