"""Packing of whole documents into sequences of one length, each into the first sequence that has room for it."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from moe_jax.data.token_marks import PADDING, UNCOUNTED

OPEN = 256  # sequences that may still receive documents


def pack(documents: Iterable[NDArray[np.uint32]], length: int) -> Iterator[NDArray[np.uint32]]:
    """Yield sequences of `length` tokens made of documents of at most `length` tokens with marks.

    When a document fits into none of OPEN sequences, the fullest one of them is complete. Its rest is filled with
    copies of its documents, the last one cut off, which are marked as padding: the loss does not count them, and
    routers send them nowhere.
    """
    parts: list[list[NDArray[np.uint32]]] = []
    room = np.empty(0, np.int64)  # of each open sequence
    for document in documents:
        assert 0 < len(document) <= length
        fits = np.flatnonzero(room >= len(document))
        if not len(fits):
            if len(parts) == OPEN:
                fullest = int(room.argmin())
                yield _filled(parts.pop(fullest), length)
                room = np.delete(room, fullest)
            parts.append([])
            room = np.append(room, length)
        place = int(fits[0]) if len(fits) else len(parts) - 1
        parts[place].append(document)
        room[place] -= len(document)
    for each in parts:
        yield _filled(each, length)


def _filled(documents: list[NDArray[np.uint32]], length: int) -> NDArray[np.uint32]:
    joined = np.concatenate(documents)
    sequence = np.resize(joined, length)
    sequence[len(joined) :] |= UNCOUNTED | PADDING
    return sequence
