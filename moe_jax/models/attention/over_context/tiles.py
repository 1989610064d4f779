"""Which tiles of attention's square a rank computes in each hop of a ring: plain numbers, made when a step is traced.

C ranks, of which each has two pieces of a sequence (parallel/context.py). Its n queries and the n keys that it holds in
a hop are cut into tiles of equal length; a pair of them is computed only if one of its queries sees one of its keys.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.parallel.context import piece_starts


class Hop(NamedTuple):
    """What is computed with the keys of one rank."""

    distance: int  # of that rank, counted backward around the ring
    pairs_CP2: NDArray[np.int32]  # of each rank: P pairs, a tile of queries and one of keys
    masked: bool  # whether some pairs have a query that does not see a key


class Ring(NamedTuple):
    """The hops that somebody needs, the own keys' first."""

    tile: int  # tokens
    hops: tuple[Hop, ...]


@functools.cache
def ring_of(ranks: int, own: int, window: int | None, wanted: int) -> Ring:
    """For `own` tokens of each rank; a tile has the divisor of a piece that is nearest to the `wanted` tokens.

    Every rank has as many pairs in a hop as the one that needs most of them.
    """
    piece = own // 2
    divisors = [n for n in range(1, piece + 1) if piece % n == 0]
    tile = min(divisors, key=lambda n: abs(math.log(n / wanted)))
    hops = (_hop(distance, ranks, piece, tile, window) for distance in range(ranks))
    return Ring(tile, tuple(hop for hop in hops if hop.pairs_CP2.shape[1]))


def _hop(distance: int, ranks: int, piece: int, tile: int, window: int | None) -> Hop:
    first = np.stack([_first_tokens(rank, ranks, piece, tile) for rank in range(ranks)])
    age_CQK = first[:, :, None] - np.roll(first, distance, axis=0)[:, None]  # up to tile - 1 more or less in a pair
    limit = np.inf if window is None else window
    seen = (age_CQK > -tile) & (age_CQK < limit + tile - 1)
    whole = (age_CQK >= tile - 1) & (age_CQK <= limit - tile)
    count_C = seen.sum(axis=(1, 2))
    # a rank that sees fewer pairs than others computes some more, of which it sees nothing
    pairs_CP2 = np.stack([np.concatenate([np.argwhere(own), np.argwhere(~own)])[: count_C.max()] for own in seen])
    return Hop(distance, pairs_CP2.astype(np.int32), bool((seen & ~whole).any() or count_C.min() < count_C.max()))


def _first_tokens(rank: int, ranks: int, piece: int, tile: int) -> NDArray[np.int64]:
    """Of a rank's tiles, as places in their sequence."""
    return np.concatenate([start + np.arange(0, piece, tile) for start in piece_starts(rank, ranks, piece)])
