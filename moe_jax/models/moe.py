"""The MoE layer: three functions, with an exchange (`models/dispatch.py`) between each two.

T tokens of this device, k choices of each, D model width, E experts, P expert ranks, M blocks with experts. `*M` is
present in arrays of several blocks.

    route ──► dispatch ──► run_experts ──► combine ──► unpermute
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.dispatchers.hot import HotRows, permute_with_copies
from moe_jax.models.dispatchers.protocol import CapacityState, DispatchMetadata, ExpertRows
from moe_jax.models.gates import gate_of
from moe_jax.models.gates.choice import Decision, TopKRouting, tokens_per_expert
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.hooks import hooks_of
from moe_jax.models.placement import in_slots
from moe_jax.parallel.sequence_shards import share_of_sum, sum_over_sequences
from moe_jax.parallel.trees import Params


class RouterStats(NamedTuple):
    """Statistics of one block's router for this device's tokens: sums, so that they add up over devices and blocks.

    They leave out padding.
    """

    count_E: Int[Array, " *M E"]  # (token, choice) pairs per expert, dropped ones included; or slots filled
    # gate probabilities, summed over tokens; with balance per sequence, those of a sequence times its own shares
    prob_sum_E: Float[Array, " *M E"]
    z_sum: Float[Array, " *M"]  # squared log-sum-exp of the logits, summed over tokens
    num_dropped: Int[Array, " *M"]  # pairs that found no slot, or no space in the buffer
    expert_Gk: Int[Array, "*M G k"] | None = None  # of a record (`RouterInputs.recorded`); None: nothing is recorded


class RoutedTokens(NamedTuple):
    """The results of the router."""

    sent: ExpertRows
    metadata: DispatchMetadata
    stats: RouterStats
    hot: HotRows | None = None  # rows that stay on this device; None: without copies of experts


class RouterContext(NamedTuple):
    """What the router of one block reads besides the features of tokens."""

    inputs: RouterInputs | None = None  # for the gate; None: it reads features only, and no token is padding
    capacity: CapacityState | None = None  # plain step: all slots; scheduled: less those that earlier microbatches used
    slot_E: Int[Array, " E"] | None = None  # position of each expert (`models/placement.py`); None: in order
    speed_P: tuple[float, ...] | None = None  # of the expert ranks, if they are different (`migration.rank_speeds`)
    # pairs of this device per position → experts that all ranks have copies of (`models/hot_experts.py`); None: none
    choose_hot: Callable[[Int[Array, " S"]], Int[Array, " K"]] | None = None


@jax.named_scope("route")
def route(
    params: Params,
    h_TD: Float[Array, "T D"],
    moe: MoEConfig,
    ep_size: int,
    context: RouterContext,
    sequences: int | None = None,
    ragged: bool = False,
) -> RoutedTokens:
    """Gate and permute: return the rows for each expert rank, the metadata to restore tokens, and statistics.

    Router logits are computed in float32. `sequences` is how many sequences the tokens belong to; None: nothing is
    balanced per sequence. `ragged`: the rows are for a ragged exchange.
    """
    h_TD = hooks_of(moe).before_layer(h_TD)
    decision, logit_TE = gate_of(moe)(params, h_TD, context.inputs, moe)
    if moe.apply_probs_on_input:
        assert isinstance(decision, TopKRouting), "other gates are refused"
        h_TD = h_TD * decision.weight_Tk.astype(h_TD.dtype)
        decision = decision._replace(weight_Tk=jnp.ones_like(decision.weight_Tk))
    is_padding_T = None if context.inputs is None else context.inputs.is_padding
    if is_padding_T is not None:
        decision = decision.without(is_padding_T)
    placed, capacity, of_slots = in_slots(decision, context.capacity, context.slot_E, moe, context.speed_P)
    hot_rows: HotRows | None = None
    if context.choose_hot is None:
        sent, metadata = dispatcher_of(moe, ragged).permute(h_TD, placed, of_slots, ep_size, capacity)
    else:
        assert isinstance(placed, TopKRouting), "other gates are refused"
        hot_K = context.choose_hot(tokens_per_expert(placed.expert_Tk, of_slots.num_experts))
        sent, metadata, hot_rows = permute_with_copies(h_TD, placed, of_slots, ep_size, capacity, hot_K)
    stats = RouterStats(
        count_E=decision.tokens_per_expert(),
        prob_sum_E=_prob_sum(decision, moe, sequences),
        z_sum=jnp.float32(0) if logit_TE is None else _z_sum(logit_TE, is_padding_T),
        num_dropped=metadata.num_dropped,
        expert_Gk=_recorded(decision, context.inputs),
    )
    return RoutedTokens(sent, metadata, stats, hot_rows)


def _recorded(decision: Decision, inputs: RouterInputs | None) -> Int[Array, "G k"] | None:
    return inputs.recorded(decision.expert_Tk) if inputs is not None and isinstance(decision, TopKRouting) else None


def _z_sum(logit_TE: Float[Array, "T _"], is_padding_T: Bool[Array, " T"] | None) -> Float[Array, ""]:
    square_T = jnp.square(jax.nn.logsumexp(logit_TE, axis=-1))
    return (square_T if is_padding_T is None else jnp.where(is_padding_T, 0, square_T)).sum()


def _prob_sum(decision: Decision, moe: MoEConfig, sequences: int | None) -> Float[Array, " E"]:
    if moe.load_balancing_type != "sequence" or sequences is None:
        return decision.prob_TE.sum(axis=0)
    assert isinstance(decision, TopKRouting), "other gates are refused"
    prob_BE = decision.prob_TE.reshape(sequences, -1, moe.num_experts).sum(axis=1)
    counts = partial(tokens_per_expert, num_experts=moe.num_experts)
    count_BE = sum_over_sequences(jax.vmap(counts)(decision.expert_Tk.reshape(sequences, -1, moe.top_k)))
    share_BE = share_of_pairs(count_BE)
    return (jax.lax.stop_gradient(share_BE) * prob_BE).sum(axis=0)


def shared_experts(params: Params) -> list[Params]:
    """Return the parameters of a layer's MLPs that every token goes through.

    These are the shared experts, and the MLP of a dense residual.
    """
    return [params[name] for name in ("shared", "dense") if name in params]


@jax.named_scope("experts")
def run_experts(
    params: Params, received: ExpertRows, moe: MoEConfig, product: GroupedProduct, are_whole: bool = False
) -> jax.Array:
    """Apply this rank's experts to the rows that they were sent.

    Unless they `are_whole`, tensor ranks share each one, and the result is this rank's part of a sum over them.
    """
    if "down_bias" in params and not are_whole:
        params = {**params, "down_bias": share_of_sum(params["down_bias"])}
    return dispatcher_of(moe).experts(params, received, moe, product)


@jax.named_scope("unpermute")
def unpermute(
    returned: jax.Array, metadata: DispatchMetadata, moe: MoEConfig, ragged: bool = False
) -> Float[Array, "T D"]:
    """Return each token's weighted sum of what its experts returned."""
    return hooks_of(moe).after_layer(dispatcher_of(moe, ragged).unpermute(returned, metadata))


def balance_shares(global_count_ME: Int[Array, "M E"], moe: MoEConfig) -> Float[Array, "M E"]:
    """Return f, by which the load-balance loss multiplies each summed probability (see `load_balance_loss`)."""
    if moe.load_balancing_type == "sequence":
        return jnp.ones(global_count_ME.shape)  # the sums include the shares already
    if moe.load_balancing_type == "pooled":
        count_E = global_count_ME.astype(jnp.float32).sum(axis=0)  # over all blocks, which can exceed 32 bits
        return jnp.broadcast_to(share_of_pairs(count_E) / len(global_count_ME), global_count_ME.shape)
    return share_of_pairs(global_count_ME)


def share_of_pairs(count: Shaped[Array, "*N E"]) -> Float[Array, "*N E"]:
    """Return each expert's share of the (token, choice) pairs; 0 where a gate has left out every choice."""
    return count / jnp.maximum(count.sum(axis=-1, keepdims=True), 1)


def load_balance_loss(
    stats: RouterStats, global_count_ME: Int[Array, "M E"], global_tokens: int | Int[Array, ""], moe: MoEConfig
) -> Float[Array, ""]:
    """Return this device's part of Σ_blocks E · Σ_e f_e · P_e (Switch, Fedus et al. 2021, eq. 4); balanced: 1 per
    block.

    f_e is the share of all pairs that chose expert e and P_e the mean probability of e. Both are over the
    `global_tokens` of the whole global batch that are not padding; or both over each sequence, averaged over sequences
    by their tokens (DeepSeek-V3 2024, eq. 17 to 20); or both over the tokens of all blocks, as one sum instead of one
    per block (Hugging Face's Mixtral). f has no gradient, so the parts of all devices add up to the loss, and their
    gradients to its gradient.
    """
    share_ME = jax.lax.stop_gradient(balance_shares(global_count_ME, moe))
    return moe.num_experts * jnp.sum(share_ME * stats.prob_sum_E) / global_tokens
