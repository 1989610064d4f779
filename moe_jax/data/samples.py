"""The samples of a token file: sequences at equal distances, read by number.

N is the number of tokens in a sequence. A sample has N + 1 tokens: its first N are the inputs, its last N the targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import DataConfig
from moe_jax.data.chunk_checksums import ChunkChecksums
from moe_jax.data.sources import Tokens
from moe_jax.data.text_index import TextTokens
from moe_jax.data.token_marks import mark_documents
from moe_jax.data.tokens import Split
from moe_jax.errors import DataError


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of one split of a source."""

    tokens: NDArray[np.integer] | TextTokens  # 1-D
    seq_len: int  # N
    chunks: ChunkChecksums | None = None  # verifies tokens when read
    end_of_text: int | None = None  # the token after which a document begins, if documents are to be marked
    begins_with_end: bool = False  # whether a document begins with this token, too
    is_packed: bool = False  # whether the tokens are samples of N + 1 tokens with marks, not one stream
    name: str = ""  # of the source, for messages, if there are several

    @classmethod
    def of(cls, tokens: Tokens, split: Split, data: DataConfig) -> "Samples":
        """Return the samples of a split. Documents are marked if the config masks them and they have no marks."""
        is_train = split == "train"
        finds_documents = data.mask_documents and not tokens.is_packed
        own = tokens.train if is_train else tokens.validation
        meta = tokens.meta if finds_documents else None
        return cls(
            # slicing a memmap costs ten times as much as slicing an array
            own if isinstance(own, TextTokens) else np.asarray(own),
            data.seq_len,
            tokens.train_chunks if is_train else tokens.validation_chunks,
            meta.end_of_text if meta else None,
            bool(meta and meta.begin_of_text and meta.begin_of_text[0] == meta.end_of_text),
            tokens.is_packed,
            f"{tokens.setting}={tokens.path}" if data.sources else "",
        )

    @property
    def stride(self) -> int:
        """The number of tokens from the beginning of a sample to that of the next."""
        return self.seq_len + 1 if self.is_packed else self.seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - self.seq_len - 1) // self.stride + 1

    def read(self, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return the tokens of some samples [S, N + 1], with marks on documents if they have an `end_of_text`.

        With `chunks`, a damaged sample is replaced by the next intact one. Raises DataError if too many chunks are
        damaged.
        """
        starts = [
            number * self.stride if self.chunks is None else self._first_intact(self.chunks, number)
            for number in numbers
        ]
        if isinstance(self.tokens, TextTokens):
            out = self.tokens.gather(starts, self.seq_len + 1)
        else:
            out = np.empty((len(numbers), self.seq_len + 1), np.int32)
            for row, start in zip(out, starts, strict=True):
                row[:] = self.tokens[start : start + self.seq_len + 1]
        if self.end_of_text is not None:
            mark_documents(out, self.end_of_text, self.begins_with_end)
        return out

    def rest(self) -> NDArray[np.int32]:
        """Return the tokens after the last sample, with its last token, or all if there is no sample. Packed tokens
        have no rest.
        """
        start = len(self) * self.stride
        if isinstance(self.tokens, TextTokens):
            out = self.tokens.gather([start], len(self.tokens) - start)
        else:
            out = self.tokens[None, start:].astype(np.int32)
        if self.end_of_text is not None:
            mark_documents(out, self.end_of_text, self.begins_with_end)
        return out[0]

    def _first_intact(self, chunks: ChunkChecksums, number: int) -> int:
        """The first token of the first intact sample at or after `number`, wrapping around at the end of the tokens.

        Raises DataError if no sample is intact.
        """
        count = len(self)
        for other in range(number, number + count):
            start = other % count * self.stride
            if chunks.is_intact(start, start + self.seq_len + 1):
                return start
        raise DataError("no sequence is whole: data.damaged_chunks allows too much")
