"""A synthetic router whose experts are chosen more rarely the higher their number, whatever it learns."""

import jax.numpy as jnp

from moe_jax.config import MoEConfig
from moe_jax.models.gates import softmax
from moe_jax.models.gates.choice import TopKRouting


def choose(logit_TE, moe: MoEConfig) -> TopKRouting:
    """Tokens differ by their logits, made as wide as 1; experts by a bias on top."""
    spread = logit_TE.std(axis=-1, keepdims=True) + 1e-6
    return softmax.choose(logit_TE / spread - 0.15 * jnp.arange(moe.num_experts), moe)


def choose_first_too(logit_TE, moe: MoEConfig) -> TopKRouting:
    """Nearly every token chooses the first expert, and another one by its logits."""
    spread = logit_TE.std(axis=-1, keepdims=True) + 1e-6
    return softmax.choose(logit_TE / spread + 6.0 * (jnp.arange(moe.num_experts) == 0), moe)
