"""The tiles of queries and keys that a rank computes: plain numbers, made when a step is traced.

Queries and keys are split into tiles of equal length. A pair of tiles is computed only if one of its keys is visible to
one of its queries. Each of C context ranks has two pieces of a sequence, n tokens together (parallel/context.py), and
multiplies its queries with the keys of one rank in each hop of a ring, or with the keys of all ranks at once.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.config.attention_kernels import ATTENTION_TILE, tile_of
from moe_jax.parallel.context import piece_starts

TILE = ATTENTION_TILE  # tokens: few enough for fast memory, many enough for a matrix unit


class Hop(NamedTuple):
    """What is computed with the keys of one rank."""

    distance: int  # how far that rank is before this one on the ring
    pairs_CP2: NDArray[np.int32]  # for each rank P pairs: a tile of queries and a tile of keys
    masked: bool  # whether a key of some pair is not visible to all its queries


class Ring(NamedTuple):
    """The hops that some rank needs. The first one has the own keys."""

    tile: int  # tokens
    hops: tuple[Hop, ...]


@functools.cache
def of_sequence(length: int, window: int | None, preferred: int) -> tuple[int, NDArray[np.int32]]:
    """Return the tile length and the pairs [P, 2] for all tokens of a sequence, which are padded to whole tiles."""
    tile = tile_of(length, preferred)
    first = np.arange(0, length, tile)
    return tile, np.argwhere(_visible(first, first, tile, window)).astype(np.int32)


@functools.cache
def of_gathered(ranks: int, own: int, window: int | None, preferred: int) -> tuple[int, NDArray[np.int32]]:
    """Return the tile length, and for each rank the pairs [P, 2] of its own queries and of the keys of all ranks.

    Keys are ordered rank by rank. `own` and `preferred` as in `ring_of`.
    """
    tile, first_CQ = _first_tokens(ranks, own, preferred)
    return tile, _same_number(np.stack([_visible(own_Q, first_CQ.ravel(), tile, window) for own_Q in first_CQ]))


@functools.cache
def ring_of(ranks: int, own: int, window: int | None, preferred: int) -> Ring:
    """Return the hops for `own` tokens of each rank.

    The tile length is the divisor of a piece that is nearest to the `preferred` number of tokens. In a hop every rank
    computes as many pairs as the rank that needs most.
    """
    tile, first_CQ = _first_tokens(ranks, own, preferred)
    hops = (_hop(distance, first_CQ, tile, window) for distance in range(ranks))
    return Ring(tile, tuple(hop for hop in hops if hop.pairs_CP2.shape[1]))


def _hop(distance: int, first_CQ: NDArray[np.int64], tile: int, window: int | None) -> Hop:
    other_CQ = np.roll(first_CQ, distance, axis=0)
    visible = np.stack([_visible(*starts, tile, window) for starts in zip(first_CQ, other_CQ, strict=True)])
    age_CQK = first_CQ[:, :, None] - other_CQ[:, None]
    unmasked = (age_CQK >= tile - 1) & (age_CQK <= (np.inf if window is None else window) - tile)
    count_C = visible.sum(axis=(1, 2))
    masked = bool((visible & ~unmasked).any() or count_C.min() < count_C.max())
    return Hop(distance, _same_number(visible), masked)


def _visible(query_Q: NDArray[np.int64], key_K: NDArray[np.int64], tile: int, window: int | None) -> NDArray[np.bool_]:
    """Return [Q, K]: whether a key of a tile is visible to a query of another, from the tiles' first positions."""
    age_QK = query_Q[:, None] - key_K  # in a pair of tiles, ages differ from this by up to tile - 1
    return (age_QK > -tile) & (age_QK < (np.inf if window is None else window) + tile - 1)


def _same_number(visible_CQK: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the visible pairs [C, P, 2] of each rank.

    A rank with fewer visible pairs than others also computes some that are masked completely.
    """
    most = visible_CQK.sum(axis=(1, 2)).max()
    pairs = (np.concatenate([np.argwhere(own), np.argwhere(~own)])[:most] for own in visible_CQK)
    return np.stack([*pairs]).astype(np.int32)


def _first_tokens(ranks: int, own: int, preferred: int) -> tuple[int, NDArray[np.int64]]:
    """Return the tile length, and the positions [C, Q] of the first tokens of each rank's tiles in their sequence.

    The tile length is the divisor of a piece whose ratio to the `preferred` number of tokens is nearest to 1.
    """
    piece = own // 2
    divisors = [n for n in range(1, piece + 1) if piece % n == 0]
    tile = min(divisors, key=lambda n: abs(math.log(n / preferred)))
    starts_CS = np.array([piece_starts(rank, ranks, piece) for rank in range(ranks)])
    return tile, (starts_CS[:, :, None] + np.arange(0, piece, tile)).reshape(ranks, -1)
