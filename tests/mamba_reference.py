"""A slow reference of Mamba-2, as references.py has them."""

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from tests.delta_reference import convolved


def mamba(p, h_ND, model: ModelConfig):
    """What Mamba-2 adds, of one sequence: one head and one token at a time."""
    heads, groups = model.mamba.num_heads, model.mamba.n_groups
    outputs = []
    for head in range(heads):
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
        outputs.append((y + p["skip"][head] * x) * jax.nn.silu(h_ND @ p["gate"][:, head]))
    out = 0.0
    for group in range(groups):
        own = range(group * heads // groups, (group + 1) * heads // groups)
        joined = jnp.concatenate([outputs[head] for head in own], axis=-1)
        rms = jnp.sqrt((joined**2).mean(-1, keepdims=True) + model.rms_norm_eps)
        out += sum(outputs[head] / rms * p["value_norm"][head] @ p["out"][head] for head in own)
    return out
