"""The terms of the loss, and the metrics computed from them.

M blocks with experts, E experts, S sources of a mixture; A parts of a batch, L blocks, H heads of attention.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.head import LossTerms
from moe_jax.models.moe import RouterStats, load_balance_loss, share_of_pairs

Metrics = dict[str, jax.Array]


class ObjectiveParts(NamedTuple):
    """The terms of the loss and the routing counts. Each is one device's share; shares add up to the total over
    devices.
    """

    cross_entropy: Float[Array, ""]  # mean nats per token of the global batch
    load_balance_loss: Float[Array, ""]
    router_z_loss: Float[Array, ""]
    count_ME: Int[Array, "M E"]
    num_dropped_M: Float[Array, " M"]
    z_loss: Float[Array, ""] | None = None  # of the head's logits, mean per token; None: it has no weight
    source_loss_S: Float[Array, " S"] | None = None  # the parts of the cross-entropy by source; None: of no mixture
    mtp_loss: Float[Array, ""] | None = None  # mean nats per token of multi-token prediction; None: there is none
    expert_MGk: Int[Array, "M G k"] | None = None  # expert + 1 of the tokens of this share; None: nothing is recorded
    # with QK-clip the largest attention logits of the heads of this tensor rank over the queries of this rank: of each
    # part of the batch in its own place, so that parts add up; not a share
    max_logit_ALH: Float[Array, "A L H"] | None = None

    def head_loss(self, z_loss_multiplier: float, mtp_scale: Float[Array, ""] | float = 0.0) -> Float[Array, ""]:
        """Return the cross-entropy plus the weighted z-loss of the logits and the weighted loss of multi-token
        prediction, if there are any.
        """
        total = self.cross_entropy
        if self.z_loss is not None:
            total = total + z_loss_multiplier * self.z_loss
        return total if self.mtp_loss is None else total + mtp_scale * self.mtp_loss

    def auxiliary(self, moe: MoEConfig) -> Float[Array, ""]:
        """Return the weighted losses of the routers, which are added to the loss of the head."""
        return moe.aux_loss_coeff * self.load_balance_loss + moe.z_loss_coeff * self.router_z_loss


def with_max_logits(
    parts: ObjectiveParts,
    max_logit_lH: Float[Array, "l H"] | None,
    part: int | Int[Array, ""],
    count: int,
    below: int | Int[Array, ""] = 0,
) -> ObjectiveParts:
    """Return the terms with the largest logits of one of `count` parts of the batch in their place.

    They are of the l blocks above the lowest `below`; of all blocks, unless there are places already. Other places are
    0. Without logits nothing is changed.
    """
    if max_logit_lH is None:
        return parts
    so_far = parts.max_logit_ALH
    if so_far is None:
        so_far = jnp.zeros((count, *max_logit_lH.shape), max_logit_lH.dtype)
    place = jnp.int32(part), jnp.int32(below), jnp.int32(0)
    return parts._replace(max_logit_ALH=jax.lax.dynamic_update_slice(so_far, max_logit_lH[None], place))


def parts_of(
    head: LossTerms,
    stats: RouterStats | None,
    global_count_ME: Int[Array, "M E"] | None,
    global_tokens: int | Int[Array, ""],
    moe: MoEConfig,
) -> ObjectiveParts:
    """Return a device's share of each term.

    It is computed from the device's share of the head's terms, its own router statistics, the global token counts of
    experts, and the number of tokens of the global batch that are not padding.
    """
    if stats is None or global_count_ME is None:
        none = jnp.zeros((0, 0), jnp.int32), jnp.zeros(0)
        return ObjectiveParts(head.cross_entropy, *(jnp.float32(0),) * 2, *none, *head[1:])
    return ObjectiveParts(
        cross_entropy=head.cross_entropy,
        load_balance_loss=load_balance_loss(stats, global_count_ME, global_tokens, moe),
        router_z_loss=stats.z_sum.sum() / global_tokens,
        count_ME=stats.count_E,
        num_dropped_M=stats.num_dropped.astype(jnp.float32),
        z_loss=head.z_loss,
        source_loss_S=head.source_loss_S,
        mtp_loss=head.mtp_loss,
        expert_MGk=stats.expert_Gk,
    )


def metrics_of(
    total: ObjectiveParts,
    norm: jax.Array,
    rate: jax.Array,
    moe: MoEConfig,
    z_loss_multiplier: float,
    mtp_scale: Float[Array, ""] | float = 0.0,
) -> Metrics:
    """Return the metrics of a step from the sums over devices, the gradient norm and the learning rate."""
    metrics = {
        "cross_entropy": total.cross_entropy,
        "grad_norm": norm,
        "learning_rate": rate,
    }
    if total.z_loss is not None:
        metrics["z_loss"] = total.z_loss
    if total.mtp_loss is not None:
        metrics["mtp_loss"] = total.mtp_loss
    if not total.count_ME.size:
        return metrics | {"loss": total.head_loss(z_loss_multiplier, mtp_scale)}
    auxiliary = total.auxiliary(moe)
    load_ME = share_of_pairs(total.count_ME)
    pairs_M = total.count_ME.sum(axis=-1).astype(jnp.float32)  # the sum over blocks may exceed 32 bits
    return metrics | {
        "loss": total.head_loss(z_loss_multiplier, mtp_scale) + auxiliary,
        "load_balance_loss": total.load_balance_loss,
        "router_z_loss": total.router_z_loss,
        "dropped_fraction": total.num_dropped_M.sum() / jnp.maximum(pairs_M.sum(), 1),
        "block_dropped_fraction": total.num_dropped_M / jnp.maximum(pairs_M, 1),
        "expert_load": load_ME,
        "load_max_over_mean": jnp.max(load_ME) * moe.num_experts,
    }
