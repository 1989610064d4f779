"""What is minimised, as sums over this device's tokens: adding up devices gives the global objective.

B sequences of this device, N tokens of each and N1 = N + 1, M blocks with experts, E experts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Model, MoE
from moe_jax.models.gates.seen import EVALUATION, When
from moe_jax.models.head import cross_entropy
from moe_jax.models.moe import RouterStats, load_balance_loss
from moe_jax.models.transformer import Computation, forward
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.own_tokens import own_tokens


class Parts(NamedTuple):
    """This device's share of each part of the global objective, and of the routing counts."""

    cross_entropy: Float[Array, ""]  # mean nats per token of the global batch
    load_balance_loss: Float[Array, ""]
    router_z_loss: Float[Array, ""]
    count_ME: Int[Array, "M E"]
    num_dropped_M: Float[Array, " M"]


def local_objective(
    params: Any,
    token_BN1: Int[Array, "B N1"],
    model: Model,
    how: Computation,
    global_tokens: int,
    when: When = EVALUATION,
    slot_ME: Int[Array, "M E"] | None = None,
) -> tuple[Float[Array, ""], Parts]:
    """This device's share of cross-entropy + weighted load-balance and router z losses.

    `global_tokens` counts the predicted tokens of all devices; `when` says which part of which step this is, `slot_ME`
    where experts lie (None: in their order). No collective here is differentiated but the exchanges, those of tensor
    ranks, which are each other's transposes, and those of context ranks, whose transposes move the same values back.
    """
    input_Bn, target_Bn = own_tokens(token_BN1)
    seen = when.seen(token_BN1[:, :-1], model.moe, how.seed)
    x_BnD, stats = forward(params, input_Bn, model, how, seen, slot_ME)
    nats = cross_entropy(params, x_BnD, target_Bn, model, how.loss_chunk) / global_tokens
    counts_ME = None if stats is None else sum_over_batch(stats.count_E)
    moe = model.moe
    parts = parts_of(nats, stats, counts_ME, global_tokens, moe)
    auxiliary = moe.aux_loss_coeff * parts.load_balance_loss + moe.z_loss_coeff * parts.router_z_loss
    return nats + auxiliary, parts


def parts_of(
    cross_entropy: Float[Array, ""],
    stats: RouterStats | None,
    global_count_ME: Int[Array, "M E"] | None,
    global_tokens: int,
    moe: MoE,
) -> Parts:
    """The parts of a device's share, from what its routers did and what those of all devices counted."""
    if stats is None or global_count_ME is None:
        return Parts(cross_entropy, *(jnp.float32(0),) * 2, jnp.zeros((0, 0), jnp.int32), jnp.zeros(0))
    return Parts(
        cross_entropy=cross_entropy,
        load_balance_loss=load_balance_loss(stats, global_count_ME, global_tokens, moe),
        router_z_loss=stats.z_sum.sum() / global_tokens,
        count_ME=stats.count_E,
        num_dropped_M=stats.num_dropped.astype(jnp.float32),
    )
