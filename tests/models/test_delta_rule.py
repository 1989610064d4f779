"""Gated delta nets: chunks of tokens against one token after another, documents, and the cache of decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.attention.delta_rule import Tokens, first_state, in_chunks, solve_unit_lower, token_by_token

LENGTH, KEYS, VALUES = 23, 6, 5


def tokens_of(documents, seed=0, rate=None, decay=1.0):
    """Random tokens of two sequences with two key heads of three value heads each."""
    draw = np.random.default_rng(seed)
    query, key = (draw.normal(size=(2, LENGTH, 2, KEYS)) for _ in range(2))
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    value, logit = draw.normal(size=(2, LENGTH, 2, 3, VALUES)), draw.normal(size=(2, LENGTH, 2, 3))
    rates = 1 / (1 + np.exp(-logit)) if rate is None else np.full_like(logit, rate)
    arrays = (*unit, value, -decay * draw.exponential(size=logit.shape), rates)
    return Tokens(*(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(documents, jnp.int32))


ONE = np.zeros((2, LENGTH))
SEVERAL = np.stack([np.repeat([0, 1, 2], [1, 9, 13]), np.repeat([4, 7, 8], [8, 8, 7])])


def outputs_and_gradients(rule, tokens, state):
    floats, weight = tokens[:-1], np.random.default_rng(1).normal(size=tokens.value_BNGJV.shape)

    def loss(floats, state):
        out, last = rule(type(tokens)(*floats, tokens.document_BN), state, tokens.document_BN[:, 0])
        return (out * weight).sum() + (last**2).sum(), (out, last)

    grads, found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(floats, state)
    return found, grads


@pytest.mark.parametrize("documents", [ONE, SEVERAL], ids=["one document", "several"])
@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_are_the_definition(documents, chunk):
    """Outputs, the last state and all gradients, also that of the first state."""
    tokens = tokens_of(documents)
    state = jax.random.normal(jax.random.key(0), first_state(tokens).shape)
    fast = outputs_and_gradients(lambda *arguments: in_chunks(*arguments, chunk), tokens, state)
    slow = outputs_and_gradients(token_by_token, tokens, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), fast, slow)


@pytest.mark.parametrize(("rate", "decay"), [(1.0, 0.0), (1.0, 60.0), (0.0, 1.0)])
def test_extreme_rates_and_decays_stay_finite(rate, decay):
    """Values that replace each other at once; states that vanish within a token; no change at all."""
    tokens = tokens_of(SEVERAL, rate=rate, decay=decay)
    state = jnp.ones_like(first_state(tokens))
    fast = outputs_and_gradients(lambda *arguments: in_chunks(*arguments, 8), tokens, state)
    slow = outputs_and_gradients(token_by_token, tokens, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4), fast, slow)


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_a_triangular_system_is_solved(length):
    """And its gradients are those of a dense solver; what is on the diagonal and above it is not read."""
    draw = np.random.default_rng(0)
    a, y, weight = (jnp.asarray(draw.normal(size=(3, length, n)), jnp.float32) for n in (length, 4, 4))

    def slow(a, y):
        return jnp.linalg.solve(jnp.eye(length) + jnp.tril(a, -1), y)

    found = []
    for solve in (solve_unit_lower, slow):
        x, pullback = jax.vjp(solve, a / length**0.5, y)
        found.append((x, pullback(weight)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), *found)


def test_a_value_is_read_back_with_its_key():
    """With a rate of 1 and no decay the delta rule replaces the value of a key, whatever was there."""
    tokens = tokens_of(ONE, rate=1.0, decay=0.0)
    out, _ = in_chunks(tokens._replace(query_BNGK=tokens.key_BNGK), first_state(tokens), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(out, tokens.value_BNGJV, rtol=1e-4, atol=1e-5)


def test_documents_are_as_if_alone():
    tokens = tokens_of(SEVERAL)
    out, _ = in_chunks(tokens, first_state(tokens), tokens.document_BN[:, 0], 4)
    for row, numbers in enumerate(SEVERAL):
        for number in set(numbers):
            own = jax.tree.map(lambda x, keep=numbers == number, row=row: x[row : row + 1, keep], tokens)
            alone, _ = token_by_token(own, first_state(own), own.document_BN[:, 0])
            np.testing.assert_allclose(out[row, numbers == number], alone[0], rtol=1e-4, atol=1e-5)
