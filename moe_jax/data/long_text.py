"""The tokens of a text that is too long to encode at once, the same as if it were: overlapping windows are joined.

Where two windows overlap, both encode the same characters, with different context. If they agree on the middle of the
overlap, they are joined there. If they do not, the first window is extended to twice its length, and encoded again.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 2**15  # characters that each window adds
OVERLAP = 2**12  # characters that two windows share
_TOGETHER = 8  # windows encoded in one call


class Encoded(NamedTuple):
    """Tokens of a text, and the character at which each begins, in ascending order."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]


Encode = Callable[[Sequence[str]], list[Encoded]]


def encode_long(pieces: Iterable[str], encode: Encode) -> Iterator[list[int]]:
    """Tokens of the text that the pieces add up to, part by part; memory holds a few windows of it."""
    windows = _encoded(_windows(pieces), encode)
    text, tokens = next(windows, ("", Encoded(np.zeros(0, np.int64), np.zeros(0, np.int64))))
    first = wanted = 0  # token of the window that is not yielded yet; characters to have before it is joined
    for next_text, next_tokens in windows:
        if len(text) >= wanted:
            if joint := _joint(tokens, next_tokens, len(text) - OVERLAP):
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
    """Each begins with the last OVERLAP characters of the one before."""
    text, whole = "", OVERLAP + WINDOW
    for piece in pieces:
        text += piece
        while len(text) > whole:
            yield text[:whole]
            text = text[WINDOW:]
    if text:
        yield text


def _encoded(windows: Iterator[str], encode: Encode) -> Iterator[tuple[str, Encoded]]:
    while some := list(itertools.islice(windows, _TOGETHER)):
        yield from zip(some, encode(some), strict=True)


def _joint(one: Encoded, other: Encoded, shift: int) -> tuple[int, int] | None:
    """The token in the middle of an overlap, as both count it; None if they disagree around it.

    `shift` is where the other text begins in the first one.
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
    """Tokens of a window that has become longer, and the first that is not yielded yet."""
    (tokens,) = encode([text])
    return tokens, int(np.searchsorted(tokens.starts, before.starts[first])) if first else 0
