"""Slow references of a gated delta net and of norms with weights around 0, as references.py has them."""

import autograd.numpy as anp
import jax
import numpy as np

from moe_jax.config import ModelConfig
from tests.numpy_gradients import sigmoid, silu


def delta_net(p, h_BND, model: ModelConfig):
    """What a gated delta net adds, of sequences: one value head and one token at a time."""
    delta = model.delta_net
    key_heads, group = delta.key_heads, delta.num_value_heads // delta.key_heads
    ends = (0, delta.key_width, 2 * delta.key_width, None)
    of_query, of_key, of_value = (p["conv"][ends[n] : ends[n + 1]] for n in range(3))
    of_query, of_key = (each.reshape((key_heads, delta.key_head_dim, -1)) for each in (of_query, of_key))
    of_value = of_value.reshape((key_heads, group, delta.value_head_dim, -1))
    value, gate = (p[name].reshape((-1, key_heads, group, delta.value_head_dim)) for name in ("value", "gate"))
    out = 0.0
    for head in range(delta.num_value_heads):
        key_head, place = head // group, head % group
        q = unit(convolved(h_BND @ p["query"][:, key_head], of_query[key_head])) / delta.key_head_dim**0.5
        k = unit(convolved(h_BND @ p["key"][:, key_head], of_key[key_head]))
        v = convolved(h_BND @ value[:, key_head, place], of_value[key_head, place])
        step = anp.log1p(anp.exp(h_BND @ p["step"][:, key_head, place] + p["step_bias"][head]))
        kept = anp.exp(-anp.exp(p["decay_log"][head]) * step)
        rate = sigmoid(h_BND @ p["rate"][:, key_head, place])
        state_BKV, y = np.zeros((len(h_BND), q.shape[-1], v.shape[-1])), []
        for token in range(h_BND.shape[1]):
            k_BK1, v_B1V = k[:, token, :, None], v[:, token, None]
            kept_B11, rate_B11 = kept[:, token, None, None], rate[:, token, None, None]
            known_B1V = anp.swapaxes(k_BK1, 1, 2) @ state_BKV
            state_BKV = kept_B11 * (state_BKV - rate_B11 * k_BK1 * known_B1V) + rate_B11 * k_BK1 * v_B1V
            y.append((q[:, token, None] @ state_BKV)[:, 0])
        y = anp.stack(y, axis=1)
        y = y / anp.sqrt((y**2).mean(-1, keepdims=True) + model.rms_norm_eps) * p["value_norm"]
        out = out + y * silu(h_BND @ gate[:, key_head, place]) @ p["out"][head]
    return out


def convolved(x_BNF, weight_FW, bias_F=0.0):
    """SiLU of each token's weighted sum of itself, which has the last weight, and the tokens before it."""
    tokens, width = x_BNF.shape[1], weight_FW.shape[1]
    padded = anp.concatenate([np.zeros((len(x_BNF), width - 1, x_BNF.shape[2])), x_BNF], axis=1)
    return silu(sum(padded[:, n : n + tokens] * weight_FW[:, n] for n in range(width)) + bias_F)


def unit(x):
    return x / anp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def with_ones(params, model: ModelConfig):
    """The parameters with what norms multiply by, if their weights are differences from 1; not those in delta nets."""
    if not model.rms_norm_zero_centered:
        return params

    def of(path, leaf):
        name = path[-1].key
        return leaf + 1 if name.endswith("norm") and name != "value_norm" else leaf

    return jax.tree_util.tree_map_with_path(of, params)
