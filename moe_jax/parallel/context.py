"""The context axis: C ranks share the tokens of each sequence. Attention is where a rank needs the tokens of others.

A sequence of N tokens is split into 2C equal pieces, and rank r has pieces r and 2C-1-r, its n = N/C tokens. With a
causal mask all ranks then have the same amount of work (Llama 3, 2024, section 3.3.2). With one rank the functions do
nothing. All functions except `piece_starts` run inside `shard_map`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.permute import permuted


def context_ranks() -> int:
    """Return C."""
    return jax.lax.axis_size(Axis.CONTEXT)


def zigzag_shard(x: Shaped[Array, "B N ..."]) -> Shaped[Array, "B n ..."]:
    """Return this rank's tokens of each sequence."""
    return x if context_ranks() == 1 else shard_of(jax.lax.axis_index(Axis.CONTEXT), x)


def shard_of(rank: int | jax.Array, x: Shaped[Array, "B N ..."]) -> Shaped[Array, "B n ..."]:
    """Return the tokens of any rank, where there are two or more ranks."""
    ranks = context_ranks()
    piece = x.shape[1] // (2 * ranks)
    starts = piece_starts(rank, ranks, piece)
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, start, piece, axis=1) for start in starts], axis=1)


def own_positions(own: int) -> Int[Array, " n"]:
    """Return the positions of this rank's `own` tokens in their sequence."""
    return jnp.arange(own) if context_ranks() == 1 else positions_of(jax.lax.axis_index(Axis.CONTEXT), own)


def positions_of(rank: int | jax.Array, own: int) -> Int[Array, " n"]:
    """Return the positions of the `own` tokens of any rank, where there are two or more ranks."""
    piece = own // 2
    return jnp.concatenate([start + jnp.arange(piece) for start in piece_starts(rank, context_ranks(), piece)])


def piece_starts(rank: int | jax.Array, ranks: int, piece: int) -> tuple[int | jax.Array, int | jax.Array]:
    """Return where a rank's two pieces, of `piece` tokens each, begin in their sequence."""
    return rank * piece, (2 * ranks - 1 - rank) * piece


def all_gather_tokens(x: Shaped[Array, "B n ..."]) -> Shaped[Array, "B N ..."]:
    """Return the tokens of all ranks, rank by rank."""
    with jax.named_scope("context_gather"):
        return jax.lax.all_gather(x, Axis.CONTEXT, axis=1, tiled=True)


def ring_permute(x: Shaped[Array, "..."], distance: int) -> Shaped[Array, "..."]:
    """Return the `x` of the rank `distance` before this one. Ranks form a ring."""
    ranks = context_ranks()
    if distance % ranks == 0:
        return x
    with jax.named_scope("context_ring"):
        to = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
        return permuted(x, Axis.CONTEXT, to)
