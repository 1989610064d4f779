"""A slow reference of Mamba-2, as references.py has them."""

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from tests.delta_reference import convolved


def mamba(p, h_ND, model: ModelConfig):
    """What Mamba-2 adds, of one sequence: one head and one token at a time."""
    heads, groups = model.mamba.num_heads, model.mamba.n_groups

    def of_head(head):
        group = head * groups // heads
        x = convolved(h_ND @ p["value"][:, head], p["conv_value"][head], p["conv_value_bias"][head])
        b = convolved(h_ND @ p["key"][:, group], p["conv_key"][group], p["conv_key_bias"][group])
        c = convolved(h_ND @ p["query"][:, group], p["conv_query"][group], p["conv_query_bias"][group])
        dt = jnp.log1p(jnp.exp(h_ND @ p["step"][:, head] + p["step_bias"][head]))
        kept = jnp.exp(-jnp.exp(p["decay_log"][head]) * dt)

        def token(state, now):
            x, b, c, dt, kept = now
            state = kept * state + jnp.outer(dt * x, b)
            return state, state @ c

        _, y = jax.lax.scan(token, jnp.zeros((x.shape[1], b.shape[1])), (x, b, c, dt, kept))
        return (y + p["skip"][head] * x) * jax.nn.silu(h_ND @ p["gate"][:, head])

    out = 0.0
    for own in jnp.split(jnp.arange(heads), groups):
        y_HNP = jax.vmap(of_head)(own)
        rms = jnp.sqrt((y_HNP**2).mean((0, 2))[:, None] + model.rms_norm_eps)
        out += jnp.einsum("hnp,hp,hpd->nd", y_HNP / rms, p["value_norm"][own], p["out"][own])
    return out
