"""The recurrence of Mamba-2: chunks of tokens against one token after another, and documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.attention.ssd import Tokens, first_state, in_chunks, token_by_token
from tests.models.test_delta_rule import LENGTH, ONE, SEVERAL, outputs_and_gradients

KEYS, VALUES = 6, 5


def tokens_of(documents, decay=1.0):
    """Random tokens of two sequences with two groups of three heads each."""
    draw = np.random.default_rng(0)
    query, key = (draw.normal(size=(2, LENGTH, 2, KEYS)) for _ in range(2))
    value, size = draw.normal(size=(2, LENGTH, 2, 3, VALUES)), draw.exponential(size=(2, LENGTH, 2, 3))
    arrays = (jnp.asarray(x, jnp.float32) for x in (query, key, value, -decay * size))
    return Tokens(*arrays, jnp.asarray(documents, jnp.int32))


@pytest.mark.parametrize("documents", [ONE, SEVERAL], ids=["one document", "several"])
@pytest.mark.parametrize(("chunk", "decay"), [(1, 1.0), (4, 1.0), (8, 0.0), (8, 60.0), (64, 1.0)])
def test_chunks_are_the_definition(documents, chunk, decay):
    """Outputs, the last state and all gradients, also that of the first state; without decay, and with all at once."""
    tokens = tokens_of(documents, decay)
    state = jax.random.normal(jax.random.key(0), first_state(tokens).shape)
    fast = outputs_and_gradients(lambda *arguments: in_chunks(*arguments, chunk), tokens, state)
    slow = outputs_and_gradients(token_by_token, tokens, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), fast, slow)


def test_documents_are_as_if_alone():
    tokens = tokens_of(SEVERAL)
    out, _ = in_chunks(tokens, first_state(tokens), tokens.document_BN[:, 0], 4)
    for row, numbers in enumerate(SEVERAL):
        for number in set(numbers):
            own = jax.tree.map(lambda x, keep=numbers == number, row=row: x[row : row + 1, keep], tokens)
            alone, _ = token_by_token(own, first_state(own), own.document_BN[:, 0])
            np.testing.assert_allclose(out[row, numbers == number], alone[0], rtol=1e-4, atol=1e-5)
