"""Dropless dispatch, without a capacity: rows are sorted by expert and sent with their sizes.

P expert ranks, L experts on each, at most W rows from each source, S rows in the order of experts, T tokens of this
device or of a microbatch, N of a sequence, D model width. Rows beyond the real ones are 0 and belong to no expert.

A rank can receive W = T/N · `buffer.rows` rows from each source: each sequence fills its own share in the order of its
tokens, then of their choices. Pairs that do not fit are dropped and counted. Sequences are never split, so the same
rows survive however a batch is split into microbatches and over data ranks, unless hot experts are copied
(`models/hot_experts.py`): the loads of the first microbatch choose them, and their rows need no buffer.

Without a buffer W = T·min(k, L), the worst case: all tokens choose this rank.
"""

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models import routing
from moe_jax.models.dispatchers.protocol import Buffer, CapacityState, ExpertRows, TopKMetadata, piece_bounds
from moe_jax.models.expert_matmuls import expert_product
from moe_jax.models.gates.choice import TopKRouting, tokens_per_expert
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.layers import mlp
from moe_jax.parallel.trees import Params


class Places(NamedTuple):
    """Where the rows of (token, choice) pairs are in the blocks of all ranks."""

    dest_index_Tk: Int[Array, "T k"]  # among the P·W rows
    keep_mask_Tk: Bool[Array, "T k"]  # whether the pair has a row
    count_PL: Int[Array, "P L"]  # rows of each expert
    width: int  # W
    num_dropped: Int[Array, ""]


def permute(
    x_TD: Float[Array, "T D"], choice: TopKRouting, moe: MoEConfig, ep_size: int, capacity: CapacityState | None = None
) -> tuple[ExpertRows, TopKMetadata]:
    """Return rows for each rank [P, W, D], sorted by expert, and how many of them each of its experts gets [P, L].

    Only the buffer of `capacity` is read; what earlier parts of the batch used does not matter.
    """
    dest_index_Tk, keep_mask_Tk, count_PL, width, num_dropped = place(choice.expert_Tk, moe, ep_size, capacity)
    permutation = routing.make_permutation(dest_index_Tk, keep_mask_Tk, ep_size * width)
    rows = routing.to_rows(x_TD, permutation).reshape(ep_size, width, x_TD.shape[1])
    return ExpertRows(rows, count_PL), TopKMetadata(permutation, choice.weight_Tk, num_dropped)


def place(expert_Tk: Int[Array, "T k"], moe: MoEConfig, ep_size: int, capacity: CapacityState | None) -> Places:
    """Return the place of each pair's row. Expert E means no expert."""
    tokens, local_experts = len(expert_Tk), moe.num_experts // ep_size
    width = tokens * min(moe.top_k, local_experts)
    wanted_Tk = keep_mask_Tk = expert_Tk < moe.num_experts
    if capacity is not None and capacity.buffer is not None:
        width = tokens // capacity.buffer.tokens * capacity.buffer.rows
        keep_mask_Tk &= _fits(expert_Tk // local_experts, capacity.buffer, ep_size)
        expert_Tk = jnp.where(keep_mask_Tk, expert_Tk, moe.num_experts)  # index E: no expert
    count_E = tokens_per_expert(expert_Tk, moe.num_experts + 1)
    rank_Tk = routing.rank_in_expert(expert_Tk, count_E)
    count_PL = count_E[:-1].reshape(ep_size, local_experts)
    # where the rows of an expert begin in the block of its rank
    start_E = jnp.append(jnp.cumsum(count_PL, axis=1) - count_PL, 0)
    dest_index_Tk = expert_Tk // local_experts * width + start_E[expert_Tk] + rank_Tk
    return Places(dest_index_Tk, keep_mask_Tk, count_PL, width, jnp.sum(wanted_Tk & ~keep_mask_Tk))


def _fits(rank_Tk: Int[Array, "T k"], buffer: Buffer, ep_size: int) -> Bool[Array, "T k"]:
    """Return whether each pair is among the first of its sequence for its rank. Rank P means no rank."""
    sequence_T1 = jnp.arange(len(rank_Tk), dtype=jnp.int32)[:, None] // buffer.tokens
    groups = len(rank_Tk) // buffer.tokens * ep_size
    group_Tk = jnp.where(rank_Tk < ep_size, sequence_T1 * ep_size + rank_Tk, groups)
    count = tokens_per_expert(group_Tk, groups)
    return routing.rank_in_expert(group_Tk, count) < buffer.rows


def split(sent: ExpertRows, pieces: int) -> list[ExpertRows]:
    """Split each rank's rows into equal ranges, with how many rows of each expert are in them."""
    rows, count_PL = _rows_and_sizes(sent)
    end_PL = jnp.cumsum(count_PL, axis=1)
    start_PL = end_PL - count_PL

    def piece(low: int, high: int) -> ExpertRows:
        own = rows[:, low:high]
        return ExpertRows(own, jnp.maximum(jnp.minimum(end_PL, high) - jnp.maximum(start_PL, low), 0))

    return [piece(*bounds) for bounds in pairwise(piece_bounds(rows.shape[1], pieces))]


def experts(params: Params, received: ExpertRows, moe: MoEConfig, product: GroupedProduct) -> Float[Array, "P W D"]:
    """Sort the received rows by expert, multiply group by group, and undo the sort."""
    x_PWD, count_PL = _rows_and_sizes(received)
    ep_size, width, features = x_PWD.shape
    tile = product.tile(ep_size * width, count_PL.shape[1])
    sorting, size_L = _sort_by_expert(count_PL, width, tile)
    x_SD = routing.to_rows(x_PWD.reshape(ep_size * width, features), sorting)
    y_SD = mlp(params, x_SD, expert_product(product.of(size_L, len(x_SD), tile), moe))
    return routing.to_rows(y_SD, routing.inverse(sorting)).reshape(x_PWD.shape)


def _rows_and_sizes(x: ExpertRows) -> tuple[Float[Array, "P W D"], Int[Array, "P L"]]:
    assert x.sizes is not None, "dropless rows travel with their sizes"
    return x.rows, x.sizes


def _sort_by_expert(
    count_PL: Int[Array, "P L"], width: int, tile: int
) -> tuple[routing.TokenPermutation, Int[Array, " L"]]:
    """Return the map that makes received rows of one expert neighbours, in whole tiles, and the size of each group."""
    ep_size, local_experts = count_PL.shape
    end_PL = jnp.cumsum(count_PL, axis=1)
    size_L = -(-count_PL.sum(axis=0) // tile) * tile
    # for the rows of an expert from one source: their first place minus their first row in the source's block
    shift_PL = jnp.cumsum(size_L) - size_L + jnp.cumsum(count_PL, axis=0) - count_PL - (end_PL - count_PL)
    row_W = jnp.arange(width, dtype=jnp.int32)
    expert_PW = jnp.sum(row_W[:, None] >= end_PL[:, None, :], axis=-1)  # L: an empty row
    place_PW = row_W + jnp.take_along_axis(shift_PL, jnp.minimum(expert_PW, local_experts - 1), axis=1)
    num_rows = -(-(ep_size * width + local_experts * (tile - 1)) // tile) * tile
    exists_S1 = (expert_PW < local_experts).reshape(-1, 1)
    return routing.make_permutation(place_PW.reshape(-1, 1), exists_S1, num_rows), size_L


def unpermute(returned_PWD: Float[Array, "P W D"], metadata: TopKMetadata) -> Float[Array, "T D"]:
    """Return weighted sums of each token's rows. A token whose rows were all dropped gets 0."""
    rows: jax.Array = returned_PWD.reshape(-1, returned_PWD.shape[-1])
    return routing.from_rows(rows, metadata.weight_Tk, metadata.permutation)
