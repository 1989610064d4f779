"""Slow references of a gated delta net and of norms with weights around 0, as references.py has them."""

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig


def delta_net(p, h_ND, model: ModelConfig):
    """What a gated delta net adds, of one sequence: one value head and one token at a time."""
    delta = model.delta_net
    key_heads, group = delta.key_heads, delta.num_value_heads // delta.key_heads
    of_query, of_key, of_value = jnp.split(p["conv"], [delta.key_width, 2 * delta.key_width])
    of_query, of_key = (each.reshape(key_heads, delta.key_head_dim, -1) for each in (of_query, of_key))
    of_value = of_value.reshape(key_heads, group, delta.value_head_dim, -1)
    value, gate = (p[name].reshape(-1, key_heads, group, delta.value_head_dim) for name in ("value", "gate"))

    def of_head(head):
        key_head, place = head // group, head % group
        q = unit(convolved(h_ND @ p["query"][:, key_head], of_query[key_head])) / delta.key_head_dim**0.5
        k = unit(convolved(h_ND @ p["key"][:, key_head], of_key[key_head]))
        v = convolved(h_ND @ value[:, key_head, place], of_value[key_head, place])
        step = jnp.log1p(jnp.exp(h_ND @ p["step"][:, key_head, place] + p["step_bias"][head]))
        kept = jnp.exp(-jnp.exp(p["decay_log"][head]) * step)
        rate = 1 / (1 + jnp.exp(-h_ND @ p["rate"][:, key_head, place]))

        def token(state, now):
            q, k, v, kept, rate = now
            state = kept * (state - rate * jnp.outer(k, k @ state)) + rate * jnp.outer(k, v)
            return state, q @ state

        _, y = jax.lax.scan(token, jnp.zeros((len(k[0]), len(v[0]))), (q, k, v, kept, rate))
        y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + model.rms_norm_eps) * p["value_norm"]
        return y * jax.nn.silu(h_ND @ gate[:, key_head, place]) @ p["out"][head]

    return jax.vmap(of_head)(jnp.arange(delta.num_value_heads)).sum(0)


def convolved(x_NF, weight_FW, bias_F=0.0):
    """SiLU of each token's weighted sum of itself, which has the last weight, and the tokens before it."""
    padded = jnp.concatenate([jnp.zeros((weight_FW.shape[1] - 1, x_NF.shape[1])), x_NF])
    return jax.nn.silu(sum(padded[n : n + len(x_NF)] * weight_F for n, weight_F in enumerate(weight_FW.T)) + bias_F)


def unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def with_ones(params, model: ModelConfig):
    """The parameters with what norms multiply by, if their weights are differences from 1; not those in delta nets."""
    if not model.rms_norm_zero_centered:
        return params

    def of(path, leaf):
        name = path[-1].key
        return leaf + 1 if name.endswith("norm") and name != "value_norm" else leaf

    return jax.tree_util.tree_map_with_path(of, params)
