"""The MoE layer: three functions with an exchange between each two.

T tokens of this device, k choices of each, D model width, E experts, P expert ranks, M blocks with experts.
`*M` is there once blocks are collected.

    route ──► exchange ──► run_experts ──► exchange ──► combine
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.models.gates import gate_of
from moe_jax.models.gates.choice import Choice, Decision, expert_counts
from moe_jax.models.gates.seen import Seen
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.hooks import hooks_of
from moe_jax.models.hooks.protocol import Around
from moe_jax.models.orders import order_of
from moe_jax.models.orders.protocol import Room
from moe_jax.models.placement import in_slots
from moe_jax.parallel.all_to_all import exchange_named
from moe_jax.parallel.over_tensor import Route, Send
from moe_jax.parallel.own_tokens import sum_over_sequences


class RouterStats(NamedTuple):
    """What one block's router did with this device's tokens; sums, so that devices and blocks add up."""

    count_E: Int[Array, " *M E"]  # (token, choice) pairs per expert, dropped ones included; or slots that it fills
    # gate probabilities, summed over tokens; those of each sequence times its own shares if that is what balances
    prob_sum_E: Float[Array, " *M E"]
    z_sum: Float[Array, " *M"]  # squared log-sum-exp of the logits, summed over tokens
    num_dropped: Int[Array, " *M"]  # pairs that found no slot, or no room in the buffer


@jax.named_scope("route")
def route(
    params: Any,
    h_TD: Float[Array, "T D"],
    moe: MoE,
    ranks: int,
    room: Room | None = None,
    ragged: bool = False,
    seen: Seen | None = None,
    sequences: int | None = None,
    slot_E: Int[Array, " E"] | None = None,
) -> tuple[Any, Any, RouterStats]:
    """Gate and order: the rows to send to each expert rank, the ticket to bring them back, and what was chosen.

    Router logits are computed in float32. `room` (None: all) is what earlier parts of the batch left; `seen` what else
    the gate looks at, if it does. `sequences` are how many the tokens are of; None: nothing is balanced. `slot_E` is
    where experts lie, if not in their order (`models/placement.py`).
    """
    h_TD = hooks_of(moe).before_layer(h_TD)
    decision, logit_TE = gate_of(moe)(params, h_TD, seen, moe)
    placed, room, of_slots = in_slots(decision, room, slot_E, moe)
    sent, ticket = order_of(moe, ragged).order(h_TD, placed, of_slots, ranks, room)
    stats = RouterStats(
        count_E=decision.count_E(),
        prob_sum_E=_prob_sum(decision, moe, sequences),
        z_sum=jnp.float32(0) if logit_TE is None else jnp.square(jax.nn.logsumexp(logit_TE, axis=-1)).sum(),
        num_dropped=ticket.num_dropped,
    )
    return sent, ticket, stats


def _prob_sum(decision: Decision, moe: MoE, sequences: int | None) -> Float[Array, " E"]:
    if moe.load_balancing_type != "sequence" or sequences is None:
        return decision.prob_TE.sum(axis=0)
    assert isinstance(decision, Choice), "other gates are refused"
    prob_BE = decision.prob_TE.reshape(sequences, -1, moe.num_experts).sum(axis=1)
    counts = partial(expert_counts, num_experts=moe.num_experts)
    count_BE = sum_over_sequences(jax.vmap(counts)(decision.expert_Tk.reshape(sequences, -1, moe.top_k)))
    share_BE = count_BE / count_BE.sum(axis=-1, keepdims=True)
    return (jax.lax.stop_gradient(share_BE) * prob_BE).sum(axis=0)


def exchange(rows: Any, name: str, way: Route, moe: MoE) -> Any:
    """All-to-all `name`, dispatch or combine, of every array of a tree: block p goes to rank p."""
    hooks, own = hooks_of(moe), exchange_named(way.algorithm).between(way.ranks)
    around, backward = hooks.around(name, backward=False), hooks.around(name, backward=True)

    def sent(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        send = partial(sent_by, own, own, around, backward) if is_float else own
        return way.carry(x, send, to_experts=name == "dispatch")

    with jax.named_scope(name):
        return jax.tree.map(sent, rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def sent_by(there: Send, back: Send, around: Around, backward: Around, x: jax.Array) -> jax.Array:
    """Rows that travel `there`, with `around` them; their cotangents travel `back`, with `backward` around them."""
    return around.after(there(around.before(x)), x.dtype)


def _forward(there: Send, back: Send, around: Around, backward: Around, x: jax.Array) -> tuple[jax.Array, None]:
    return sent_by(there, back, around, backward, x), None


def _backward(there: Send, back: Send, around: Around, backward: Around, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (sent_by(back, there, backward, around, dx),)


sent_by.defvjp(_forward, _backward)


def beside_experts(params: Any) -> list[Any]:
    """MLPs of a layer that every token meets: shared experts, and that of a dense block."""
    return [params[name] for name in ("shared", "dense") if name in params]


@jax.named_scope("experts")
def run_experts(params: Any, received: Any, moe: MoE, product: GroupedProduct) -> jax.Array:
    """This rank's experts on the rows they were sent."""
    return order_of(moe).experts(params, received, moe, product)


@jax.named_scope("unpermute")
def combine(returned: jax.Array, ticket: Any, moe: MoE, ragged: bool = False) -> Float[Array, "T D"]:
    """Inverse order: each token's weighted sum of what its experts returned."""
    return hooks_of(moe).after_layer(order_of(moe, ragged).inverse(returned, ticket))


def balance_shares(global_count_ME: Int[Array, "M E"], moe: MoE) -> Float[Array, "M E"]:
    """What the load-balance loss multiplies each summed probability with: `f` below."""
    if moe.load_balancing_type == "sequence":
        return jnp.ones(global_count_ME.shape)  # the sums have shares in them already
    if moe.load_balancing_type == "pooled":
        count_E = global_count_ME.astype(jnp.float32).sum(axis=0)  # of all blocks: more than 32 bits count
        return jnp.broadcast_to(count_E / count_E.sum() / len(global_count_ME), global_count_ME.shape)
    return global_count_ME / global_count_ME.sum(axis=-1, keepdims=True)


def load_balance_loss(
    stats: RouterStats, global_count_ME: Int[Array, "M E"], global_tokens: int, moe: MoE
) -> Float[Array, ""]:
    """This device's part of Σ_blocks E · Σ_e f_e · P_e (Switch, Fedus et al. 2021, eq. 4); balanced: 1 per block.

    f_e is the share of all pairs that chose expert e and P_e the mean probability of e, both over the whole global
    batch; or both over each sequence, averaged over these (DeepSeek-V3 2024, eq. 17 to 20); or both over the tokens of
    all blocks, as one sum instead of one per block (Hugging Face's Mixtral). f has no gradient, so the parts of all
    devices add up to the loss and their gradients to its gradient.
    """
    share_ME = jax.lax.stop_gradient(balance_shares(global_count_ME, moe))
    return moe.num_experts * jnp.sum(share_ME * stats.prob_sum_E) / global_tokens
