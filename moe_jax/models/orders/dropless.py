"""No drops: rows sorted by expert, as many as there are, sent with their sizes.

P expert ranks, L experts on each, W rows from each source at most, S rows in the experts' order, T tokens, D model
width. W = T·min(k, L): all tokens might choose this rank. Rows beyond the real ones are 0 and belong to no
expert.
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
    ranks, width, features = x_PWD.shape
    product = GROUPED_PRODUCTS[platform]
    tile = product.tile(ranks * width, count_PL.shape[1])
    sorting, size_L = _sort_by_expert(count_PL, width, tile)
    x_SD = routing.to_rows(x_PWD.reshape(ranks * width, features), sorting)
    y_SD = mlp(params, x_SD, lambda x, w: product.multiply(x, w.astype(x.dtype), size_L, tile))
    return routing.to_rows(y_SD, routing.inverse(sorting)).reshape(x_PWD.shape)


def _sort_by_expert(count_PL: Int[Array, "P L"], width: int, tile: int) -> tuple[routing.Rows, Int[Array, " L"]]:
    """Where each received row goes so that rows of one expert are neighbours, in whole tiles, and how many that are."""
    ranks, held = count_PL.shape
    end_PL = jnp.cumsum(count_PL, axis=1)
    size_L = -(-count_PL.sum(axis=0) // tile) * tile
    # of an expert's rows from one source: their first place, less their first row there
    shift_PL = jnp.cumsum(size_L) - size_L + jnp.cumsum(count_PL, axis=0) - count_PL - (end_PL - count_PL)
    row_W = jnp.arange(width, dtype=jnp.int32)
    expert_PW = jnp.sum(row_W[:, None] >= end_PL[:, None, :], axis=-1)  # L: an empty row
    place_PW = row_W + jnp.take_along_axis(shift_PL, jnp.minimum(expert_PW, held - 1), axis=1)
    num_rows = -(-(ranks * width + held * (tile - 1)) // tile) * tile
    exists_S1 = (expert_PW < held).reshape(-1, 1)
    return routing.assign_rows(place_PW.reshape(-1, 1), exists_S1, num_rows), size_L


def inverse(returned_PWD: Float[Array, "P W D"], ticket: Ticket) -> Float[Array, "T D"]:
    """Weighted sums of each token's rows."""
    return routing.from_rows(returned_PWD.reshape(-1, returned_PWD.shape[-1]), ticket.weight_Tk, ticket.rows)
