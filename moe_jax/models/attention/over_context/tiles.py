"""The tiles of queries and keys that a rank computes in each hop of a ring: plain numbers, made when a step is traced.

Each of C ranks has two pieces of a sequence (parallel/context.py). Its n queries, and the n keys of a hop, are split
into tiles of equal length. A pair of tiles is computed only if one of its keys is visible to one of its queries.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.parallel.context import piece_starts


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
def ring_of(ranks: int, own: int, window: int | None, preferred: int) -> Ring:
    """Return the hops for `own` tokens of each rank.

    The tile length is the divisor of a piece that is nearest to the `preferred` number of tokens. In a hop every rank
    computes as many pairs as the rank that needs most.
    """
    piece = own // 2
    divisors = [n for n in range(1, piece + 1) if piece % n == 0]
    tile = min(divisors, key=lambda n: abs(math.log(n / preferred)))
    hops = (_hop(distance, ranks, piece, tile, window) for distance in range(ranks))
    return Ring(tile, tuple(hop for hop in hops if hop.pairs_CP2.shape[1]))


def _hop(distance: int, ranks: int, piece: int, tile: int, window: int | None) -> Hop:
    first = np.stack([_first_tokens(rank, ranks, piece, tile) for rank in range(ranks)])
    # in a pair of tiles, ages differ from this by up to tile - 1
    age_CQK = first[:, :, None] - np.roll(first, distance, axis=0)[:, None]
    limit = np.inf if window is None else window
    visible = (age_CQK > -tile) & (age_CQK < limit + tile - 1)
    unmasked = (age_CQK >= tile - 1) & (age_CQK <= limit - tile)
    count_C = visible.sum(axis=(1, 2))
    # a rank with fewer visible pairs than others also computes some that are masked completely
    pairs_CP2 = np.stack([np.concatenate([np.argwhere(own), np.argwhere(~own)])[: count_C.max()] for own in visible])
    return Hop(distance, pairs_CP2.astype(np.int32), bool((visible & ~unmasked).any() or count_C.min() < count_C.max()))


def _first_tokens(rank: int, ranks: int, piece: int, tile: int) -> NDArray[np.int64]:
    """Return the positions of the first tokens of a rank's tiles in their sequence."""
    return np.concatenate([start + np.arange(0, piece, tile) for start in piece_starts(rank, ranks, piece)])
