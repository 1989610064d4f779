"""Marks on the tokens of a batch: bits of an int32 above the token's index in the vocabulary.

A batch with marks has the shape, the sharding and the order of one without them. Only steps whose config has
`data.has_marks` receive marks and remove them.

S sequences of N + 1 tokens = N1.
"""

import jax
import numpy as np
from jaxtyping import Array, Bool, Int
from numpy.typing import NDArray

from moe_jax.config.sections import MOST_MARKED_SOURCES

PADDING = 1 << 31  # a token that only fills a sequence: of an int32, the sign
FIRST = 1 << 30  # the first token of a document
UNCOUNTED = 1 << 29  # the loss does not count the prediction of this token
_SOURCE_BIT = 24  # a vocabulary has at most 2²⁴ tokens; the bits from here to UNCOUNTED are the number of the source
_INDEX = (1 << _SOURCE_BIT) - 1
_SOURCE = UNCOUNTED - 1 - _INDEX
assert MOST_MARKED_SOURCES == (_SOURCE >> _SOURCE_BIT) + 1


def mark_documents(token_SN1: NDArray[np.int32], end_of_text: int, begins_with_end: bool = False) -> None:
    """Mark the first token of each document, in place: the one after an `end_of_text`.

    If documents also begin with that token, it is the second of two. The first token of a sequence needs no mark.
    """
    is_end = token_SN1 & _INDEX == end_of_text
    is_first = is_end[:, :-1] & is_end[:, 1:] if begins_with_end else is_end[:, :-1]
    token_SN1[:, 1:][is_first] |= FIRST


def mark_sources(token_SN1: NDArray[np.int32], source_S: NDArray[np.int64]) -> None:
    """Mark the tokens of each sequence with its source, a number below MOST_MARKED_SOURCES, in place."""
    token_SN1 |= (source_S << _SOURCE_BIT).astype(np.int32)[:, None]


def sources(token_BN: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Return the number of each token's source; 0 without such marks."""
    return (token_BN & _SOURCE) >> _SOURCE_BIT


def indices(token_BN: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Return the tokens without marks."""
    return token_BN & _INDEX


def without_marks(token_SN1: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return what `indices` returns, on the host."""
    return token_SN1 & _INDEX


def counted(target_BN: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Return which targets the loss counts.

    The first token of a document does not count: it would be predicted from another document. The end of a text does.
    """
    return target_BN & (FIRST | UNCOUNTED) == 0


def first(token_BN: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Return which tokens begin a document, other than a sequence's first token."""
    return token_BN & FIRST != 0


def padding(token_BN: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Return which tokens only fill a sequence."""
    return token_BN < 0


def num_targets(token_SN1: NDArray[np.int32]) -> int:
    """Return how many targets of these sequences the loss counts; at least 1."""
    return max(int((token_SN1[:, 1:] & (FIRST | UNCOUNTED) == 0).sum()), 1)


def documents(token_BN: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Return the number of each token's document in its sequence, from 0."""
    return jax.numpy.cumsum(first(token_BN).astype(jax.numpy.int32), axis=1)
