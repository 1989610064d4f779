"""A slow reference of Mamba-2, as references.py has them."""

import autograd.numpy as anp
import numpy as np

from moe_jax.config import ModelConfig
from tests.delta_reference import convolved
from tests.numpy_gradients import silu


def mamba(p, h_BND, model: ModelConfig):
    """What Mamba-2 adds, of sequences: one head and one token at a time."""
    heads, groups = model.mamba.num_heads, model.mamba.n_groups

    def of_head(head):
        group = head * groups // heads
        x = convolved(h_BND @ p["value"][:, head], p["conv_value"][head], p["conv_value_bias"][head])
        b = convolved(h_BND @ p["key"][:, group], p["conv_key"][group], p["conv_key_bias"][group])
        c = convolved(h_BND @ p["query"][:, group], p["conv_query"][group], p["conv_query_bias"][group])
        dt = anp.log1p(anp.exp(h_BND @ p["step"][:, head] + p["step_bias"][head]))
        kept = anp.exp(-anp.exp(p["decay_log"][head]) * dt)
        state_BPS, y = np.zeros((len(h_BND), x.shape[-1], b.shape[-1])), []
        for token in range(h_BND.shape[1]):
            new_BPS = (dt[:, token, None] * x[:, token])[:, :, None] * b[:, token, None]
            state_BPS = kept[:, token, None, None] * state_BPS + new_BPS
            y.append((state_BPS @ c[:, token, :, None])[..., 0])
        return (anp.stack(y, axis=1) + p["skip"][head] * x) * silu(h_BND @ p["gate"][:, head])

    out = 0.0
    for own in np.split(np.arange(heads), groups):
        y_h = [of_head(head) for head in own]
        square = sum((y_BNP**2).mean(-1, keepdims=True) for y_BNP in y_h) / len(own)
        rms = anp.sqrt(square + model.rms_norm_eps)
        for head, y_BNP in zip(own, y_h, strict=True):
            out = out + y_BNP / rms * p["value_norm"][head] @ p["out"][head]
    return out
