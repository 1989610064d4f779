"""Which tokens may be drawn, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.sampling import Sampling, draw, restrict

LOGITS = jnp.array(np.random.default_rng(0).normal(0, 2, (6, 40)), jnp.float32)


def allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """The tokens that are left of one row, by the definition of each restriction."""
    left = {int(token): float(logits[token]) for token in np.argsort(-logits)}
    if sampling.top_k is not None:
        left = dict(list(left.items())[: sampling.top_k])

    def shares() -> dict[int, float]:
        total = sum(np.exp(logit) for logit in left.values())
        return {token: float(np.exp(logit) / total) for token, logit in left.items()}

    if sampling.top_p is not None:
        kept, sum_so_far = [], 0.0
        for token, share in shares().items():
            if sum_so_far < sampling.top_p:
                kept.append(token)
            sum_so_far += share
        left = {token: left[token] for token in kept}
    if sampling.min_p is not None:
        of = shares()
        left = {token: left[token] for token in left if of[token] >= sampling.min_p * max(of.values())}
    return set(left)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_k=1000),
        Sampling(1.0, top_p=0.7),
        Sampling(1.0, top_p=0.01),
        Sampling(1.0, min_p=0.1),
        Sampling(1.0, top_k=12, top_p=0.9, min_p=0.2),
    ],
)
def test_the_tokens_of_a_restriction_are_left(sampling):
    left = np.asarray(restrict(LOGITS, sampling))
    for row, own in zip(left, np.asarray(LOGITS), strict=True):
        expected = allowed(own, sampling)
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == expected
        np.testing.assert_array_equal(row[sorted(expected)], own[sorted(expected)])


def test_draws_follow_the_probabilities():
    keys = jax.random.split(jax.random.key(0), 4000)
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.25, 0.2, 0.05])), (len(keys), 1))

    def shares(*settings, **named) -> np.ndarray:
        return np.bincount(draw(logits, keys, Sampling(*settings, **named)), minlength=4) / len(keys)

    np.testing.assert_allclose(shares(1.0), [0.5, 0.25, 0.2, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(0.5), np.array([0.25, 0.0625, 0.04, 0.0025]) / 0.355, atol=0.03)
    assert shares(0.0).tolist() == [1, 0, 0, 0]
