"""The tokens of a text file, computed when they are read: documents are found by an index of their tokens' numbers.

D documents of a split; S spans of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_jax.data.documents import Documents, Place
from moe_jax.data.encode import Document, encode_documents
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import DataError


@dataclass(frozen=True, eq=False)
class TextTokens:
    """The tokens of one split of a text file: a document after the other, as in a prepared folder."""

    documents: Documents
    tokenizer: Tokenizer
    place_D2: NDArray[np.int64]  # of each document: the two numbers of its Place
    end_D: NDArray[np.int64]  # tokens up to the end of each document
    skipped: int = 0  # characters of the first document that are of another split
    kept: int | None = None  # characters of the last document that are of this split; None: all

    def __len__(self) -> int:
        return int(self.end_D[-1]) if len(self.end_D) else 0

    def gather(self, starts: Sequence[int], length: int) -> NDArray[np.int32]:
        """Return the spans of `length` tokens that begin at `starts` [S, length].

        All documents that they overlap are encoded in one call, which uses all cores. Raises DataError if the text has
        changed.
        """
        first_S = np.searchsorted(self.end_D, starts, "right")
        last_S = np.searchsorted(self.end_D, np.asarray(starts) + length - 1, "right")
        numbers = sorted({n for first, last in zip(first_S, last_S, strict=True) for n in range(first, last + 1)})
        tokens = dict(zip(numbers, encode_documents([self._document(n) for n in numbers], self.tokenizer), strict=True))
        for number, found in tokens.items():
            if len(found) != self.end_D[number] - self._begin(number):
                raise DataError(
                    f"{self.documents.file} has other tokens than were counted in it: start again when nothing writes "
                    "there"
                )
        out = np.empty((len(starts), length), np.int32)
        for row, start, first, last in zip(out, starts, first_S, last_S, strict=True):
            joined = np.concatenate([np.asarray(tokens[n], np.int32) for n in range(first, last + 1)])
            row[:] = joined[start - self._begin(first) :][:length]
        return out

    def _begin(self, number: int) -> int:
        """The number of tokens before a document."""
        return int(self.end_D[number - 1]) if number else 0

    def _document(self, number: int) -> Document:
        text, is_last = self.documents.read(Place(*self.place_D2[number].tolist())), number == len(self.end_D) - 1
        if is_last and self.kept is not None:
            return text[: self.kept], False
        return (text[self.skipped :] if number == 0 else text), True
