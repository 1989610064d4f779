"""No drops: rows sorted by expert, as many as there are, sent with their sizes.

P expert ranks, L experts on each, W rows from each source at most, S = P·W rows received, T tokens, D model width.
W = T·min(k, L): all tokens might choose this rank. Rows beyond the real ones are 0 and belong to no expert.
"""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoE
from moe_jax.models import routing
from moe_jax.models.gates.choice import Choice
from moe_jax.models.grouped_matmul import GROUPED_PRODUCTS
from moe_jax.models.layers import mlp
from moe_jax.models.orders.protocol import Room, Ticket, piece_bounds

Sent = tuple[Float[Array, "P W D"], Int[Array, "P L"]]


def order(
    x_TD: Float[Array, "T D"], choice: Choice, moe: MoE, ranks: int, room: Room | None = None
) -> tuple[Sent, Ticket]:
    """Rows for each rank, sorted by expert, and how many of them each of its experts gets; `room` never runs out."""
    held = moe.num_experts // ranks
    width = x_TD.shape[0] * min(moe.top_k, held)
    count_E = routing.expert_counts(choice.expert_Tk, moe.num_experts)
    count_PL = count_E.reshape(ranks, held)
    start_E = (jnp.cumsum(count_PL, axis=1) - count_PL).ravel()  # of an expert's rows in its rank's block
    rank_Tk = routing.rank_in_expert(choice.expert_Tk, count_E)
    row_Tk = choice.expert_Tk // held * width + start_E[choice.expert_Tk] + rank_Tk
    rows = routing.assign_rows(row_Tk, jnp.ones_like(row_Tk, bool), ranks * width)
    sent = routing.to_rows(x_TD, rows).reshape(ranks, width, -1)
    return (sent, count_PL), Ticket(rows=rows, weight_Tk=choice.weight_Tk, num_dropped=jnp.int32(0))


def cut(sent: Sent, pieces: int) -> list[tuple[Float[Array, "P _ D"], Int[Array, "P L"]]]:
    """Equal ranges of each rank's rows, and how many rows of each expert lie in them."""
    x_PWD, count_PL = sent
    end_PL = jnp.cumsum(count_PL, axis=1)
    start_PL = end_PL - count_PL

    def piece(low: int, high: int) -> tuple[jax.Array, jax.Array]:
        return x_PWD[:, low:high], jnp.maximum(jnp.minimum(end_PL, high) - jnp.maximum(start_PL, low), 0)

    return [piece(*bounds) for bounds in pairwise(piece_bounds(x_PWD.shape[1], pieces))]


def experts(params: Any, received: Sent, moe: MoE, platform: str) -> Float[Array, "P W D"]:
    """Sort the received rows by expert, multiply group by group, and undo the sort."""
    x_PWD, count_PL = received
    ranks, width, _ = x_PWD.shape
    product = GROUPED_PRODUCTS[platform]
    if ranks == 1:  # the only source has sorted them already
        return mlp(params, x_PWD[0], lambda x, w: product(x, w.astype(x.dtype), count_PL[0]))[None]
    sorting, count_L = _sort_by_expert(count_PL, width)
    x_SD = routing.to_rows(x_PWD.reshape(ranks * width, -1), sorting)
    y_SD = mlp(params, x_SD, lambda x, w: product(x, w.astype(x.dtype), count_L))
    y_PWD = routing.from_rows(y_SD, jnp.ones((ranks * width, 1), jnp.float32), sorting)
    return y_PWD.reshape(x_PWD.shape)


def _sort_by_expert(count_PL: Int[Array, "P L"], width: int) -> tuple[routing.Rows, Int[Array, " L"]]:
    """Where each received row goes so that rows of one expert are neighbours, and how many each expert has."""
    ranks = count_PL.shape[0]
    end_PL = jnp.cumsum(count_PL, axis=1)
    expert_PW = jnp.sum(jnp.arange(width)[None, :, None] >= end_PL[:, None, :], axis=-1)  # L: an empty row
    count_L = count_PL.sum(axis=0)
    count = jnp.append(count_L, ranks * width - count_L.sum())  # the empty rows are a last group
    place_S1 = (jnp.cumsum(count) - count)[expert_PW.reshape(-1, 1)]
    place_S1 += routing.rank_in_expert(expert_PW.reshape(-1, 1), count)
    return routing.assign_rows(place_S1, jnp.ones((ranks * width, 1), bool), ranks * width), count_L


def inverse(returned_PWD: Float[Array, "P W D"], ticket: Ticket) -> Float[Array, "T D"]:
    """Weighted sums of each token's rows."""
    return routing.from_rows(returned_PWD.reshape(-1, returned_PWD.shape[-1]), ticket.weight_Tk, ticket.rows)
