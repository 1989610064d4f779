"""The MoE layer: three functions, with an exchange (`models/dispatch.py`) between each two.

T tokens of this device, k choices of each, D model width, E experts, P expert ranks, M blocks with experts.
`*M` is there once blocks are collected.

    route ──► dispatch ──► run_experts ──► combine ──► unpermute
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.dispatchers.protocol import CapacityState, DispatchMetadata, ExpertRows
from moe_jax.models.gates import gate_of
from moe_jax.models.gates.choice import Decision, TopKRouting, tokens_per_expert
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.hooks import hooks_of
from moe_jax.models.placement import in_slots
from moe_jax.parallel.sequence_shards import sum_over_sequences
from moe_jax.parallel.trees import Params


class RouterStats(NamedTuple):
    """What one block's router did with this device's tokens; sums, so that devices and blocks add up."""

    count_E: Int[Array, " *M E"]  # (token, choice) pairs per expert, dropped ones included; or slots that it fills
    # gate probabilities, summed over tokens; those of each sequence times its own shares if that is what balances
    prob_sum_E: Float[Array, " *M E"]
    z_sum: Float[Array, " *M"]  # squared log-sum-exp of the logits, summed over tokens
    num_dropped: Int[Array, " *M"]  # pairs that found no slot, or no room in the buffer


class RoutedTokens(NamedTuple):
    """What leaves the router."""

    sent: ExpertRows
    metadata: DispatchMetadata
    stats: RouterStats


@jax.named_scope("route")
def route(
    params: Params,
    h_TD: Float[Array, "T D"],
    moe: MoEConfig,
    ep_size: int,
    capacity: CapacityState | None = None,
    ragged: bool = False,
    router_inputs: RouterInputs | None = None,
    sequences: int | None = None,
    slot_E: Int[Array, " E"] | None = None,
) -> RoutedTokens:
    """Gate and permute: the rows to send to each expert rank, what brings them back, and what was chosen.

    Router logits are computed in float32. `capacity` (None: all) is what earlier parts of the batch left;
    `router_inputs` what else the gate reads, if it does. `sequences` is how many sequences the tokens belong to; None:
    nothing is balanced. `slot_E` is the slot of each expert, if not in their order (`models/placement.py`).
    """
    h_TD = hooks_of(moe).before_layer(h_TD)
    decision, logit_TE = gate_of(moe)(params, h_TD, router_inputs, moe)
    placed, capacity, of_slots = in_slots(decision, capacity, slot_E, moe)
    sent, metadata = dispatcher_of(moe, ragged).permute(h_TD, placed, of_slots, ep_size, capacity)
    stats = RouterStats(
        count_E=decision.tokens_per_expert(),
        prob_sum_E=_prob_sum(decision, moe, sequences),
        z_sum=jnp.float32(0) if logit_TE is None else jnp.square(jax.nn.logsumexp(logit_TE, axis=-1)).sum(),
        num_dropped=metadata.num_dropped,
    )
    return RoutedTokens(sent, metadata, stats)


def _prob_sum(decision: Decision, moe: MoEConfig, sequences: int | None) -> Float[Array, " E"]:
    if moe.load_balancing_type != "sequence" or sequences is None:
        return decision.prob_TE.sum(axis=0)
    assert isinstance(decision, TopKRouting), "other gates are refused"
    prob_BE = decision.prob_TE.reshape(sequences, -1, moe.num_experts).sum(axis=1)
    counts = partial(tokens_per_expert, num_experts=moe.num_experts)
    count_BE = sum_over_sequences(jax.vmap(counts)(decision.expert_Tk.reshape(sequences, -1, moe.top_k)))
    share_BE = count_BE / count_BE.sum(axis=-1, keepdims=True)
    return (jax.lax.stop_gradient(share_BE) * prob_BE).sum(axis=0)


def shared_experts(params: Params) -> list[Params]:
    """The parameters of a layer's MLPs that every token goes through: shared experts, and the MLP of a dense block."""
    return [params[name] for name in ("shared", "dense") if name in params]


@jax.named_scope("experts")
def run_experts(params: Params, received: ExpertRows, moe: MoEConfig, product: GroupedProduct) -> jax.Array:
    """This rank's experts on the rows they were sent."""
    return dispatcher_of(moe).experts(params, received, moe, product)


@jax.named_scope("unpermute")
def unpermute(
    returned: jax.Array, metadata: DispatchMetadata, moe: MoEConfig, ragged: bool = False
) -> Float[Array, "T D"]:
    """Each token's weighted sum of what its experts returned."""
    return hooks_of(moe).after_layer(dispatcher_of(moe, ragged).unpermute(returned, metadata))


def balance_shares(global_count_ME: Int[Array, "M E"], moe: MoEConfig) -> Float[Array, "M E"]:
    """What the load-balance loss multiplies each summed probability with: `f` below."""
    if moe.load_balancing_type == "sequence":
        return jnp.ones(global_count_ME.shape)  # the sums have shares in them already
    if moe.load_balancing_type == "pooled":
        count_E = global_count_ME.astype(jnp.float32).sum(axis=0)  # of all blocks: more than 32 bits count
        return jnp.broadcast_to(count_E / count_E.sum() / len(global_count_ME), global_count_ME.shape)
    return global_count_ME / global_count_ME.sum(axis=-1, keepdims=True)


def load_balance_loss(
    stats: RouterStats, global_count_ME: Int[Array, "M E"], global_tokens: int, moe: MoEConfig
) -> Float[Array, ""]:
    """This device's part of Σ_blocks E · Σ_e f_e · P_e (Switch, Fedus et al. 2021, eq. 4); balanced: 1 per block.

    f_e is the share of all pairs that chose expert e and P_e the mean probability of e, both over the whole global
    batch; or both over each sequence, averaged over these (DeepSeek-V3 2024, eq. 17 to 20); or both over the tokens of
    all blocks, as one sum instead of one per block (Hugging Face's Mixtral). f has no gradient, so the parts of all
    devices add up to the loss and their gradients to its gradient.
    """
    share_ME = jax.lax.stop_gradient(balance_shares(global_count_ME, moe))
    return moe.num_experts * jnp.sum(share_ME * stats.prob_sum_E) / global_tokens
