"""Experts in groups (DeepSeek-V2, 2024, section 2.1.4): a token's experts come from few groups, so from few devices.

T tokens, G groups, E experts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import MoEConfig


def mask_other_groups(
    score_TE: Float[Array, "T E"], moe: MoEConfig, score_of_group: Callable[[jax.Array], jax.Array]
) -> Float[Array, "T E"]:
    """Return the scores in each token's `topk_group` best groups, and -∞ in other groups.

    `score_of_group` maps scores [T, G, E/G] to scores of groups [T, G].
    """
    if moe.topk_group == moe.n_group:
        return score_TE
    grouped = score_TE.reshape(len(score_TE), moe.n_group, -1)
    _, group_Tg = jax.lax.top_k(score_of_group(grouped), moe.topk_group)
    allowed_TG = jax.nn.one_hot(group_Tg, moe.n_group, dtype=bool).any(axis=1)
    return jnp.where(allowed_TG[..., None], grouped, -jnp.inf).reshape(score_TE.shape)
