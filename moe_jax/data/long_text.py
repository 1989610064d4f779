"""Encoding of a text that is too long to encode at once, in overlapping windows; the tokens are the same.

In an overlap, both windows encode the same characters with different context. If their tokens agree around the middle
of the overlap, they are joined there. If not, the first window is extended to twice its length and encoded again.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 2**15  # characters that each window adds
OVERLAP = 2**12  # characters that two windows share
_WINDOWS_PER_CALL = 8  # of the encoder


class Encoded(NamedTuple):
    """The tokens of a text, and the index of the character at which each begins, in ascending order."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]


Encode = Callable[[Sequence[str]], list[Encoded]]


def encode_long(pieces: Iterable[str], encode: Encode) -> Iterator[list[int]]:
    """Yield the tokens of the concatenated pieces, part by part; only a few windows are in memory at a time."""
    windows = _encoded(_windows(pieces), encode)
    text, tokens = next(windows, ("", Encoded(np.zeros(0, np.int64), np.zeros(0, np.int64))))
    first = wanted = 0  # the first token not yielded yet; characters that the window must have before it is joined
    for next_text, next_tokens in windows:
        if len(text) >= wanted:
            if joint := _join_position(tokens, next_tokens, len(text) - OVERLAP):
                end, begin = joint
                yield tokens.ids[first:end].tolist()
                text, tokens, first, wanted = next_text, next_tokens, begin, 0
                continue
            wanted = 2 * len(text)
        text += next_text[OVERLAP:]
        if len(text) >= wanted:
            tokens, first = _extended(text, tokens, first, encode)
    if wanted > len(text):
        tokens, first = _extended(text, tokens, first, encode)
    yield tokens.ids[first:].tolist()


def _windows(pieces: Iterable[str]) -> Iterator[str]:
    """Split a text into windows, each of which begins with the last OVERLAP characters of the preceding one."""
    text, whole = "", OVERLAP + WINDOW
    for piece in pieces:
        text += piece
        while len(text) > whole:
            yield text[:whole]
            text = text[WINDOW:]
    if text:
        yield text


def _encoded(windows: Iterator[str], encode: Encode) -> Iterator[tuple[str, Encoded]]:
    """Each window with its tokens."""
    while batch := list(itertools.islice(windows, _WINDOWS_PER_CALL)):
        yield from zip(batch, encode(batch), strict=True)


def _join_position(one: Encoded, other: Encoded, shift: int) -> tuple[int, int] | None:
    """The index of the token in the middle of an overlap, in both windows; None if their tokens differ around it.

    The second window begins at character `shift` of the first one.
    """
    low, middle, high = (shift + OVERLAP * quarter // 4 for quarter in (1, 2, 3))
    here = np.searchsorted(one.starts, (low, middle, high))
    there = np.searchsorted(other.starts, (low - shift, middle - shift, high - shift))
    inside = here[0] < here[1] < here[2]  # tokens on both sides of the middle
    if not (inside and np.array_equal(here - here[0], there - there[0])):
        return None
    a, b = slice(here[0], here[2]), slice(there[0], there[2])
    same = np.array_equal(one.ids[a], other.ids[b]) and np.array_equal(one.starts[a], other.starts[b] + shift)
    return (int(here[1]), int(there[1])) if same else None


def _extended(text: str, before: Encoded, first: int, encode: Encode) -> tuple[Encoded, int]:
    """Encode a window that was extended; returns its tokens and the index of the first one not yielded yet."""
    (tokens,) = encode([text])
    return tokens, int(np.searchsorted(tokens.starts, before.starts[first])) if first else 0
