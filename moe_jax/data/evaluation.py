"""Texts to evaluate a model on, and batches with every token of a text.

B sequences of N tokens in a batch; a row has N + 1 tokens = N1. Batches are global: all processes read all rows.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import DataConfig
from moe_jax.data.documents import open_documents
from moe_jax.data.loader import validation_batches
from moe_jax.data.samples import Samples
from moe_jax.data.token_marks import FIRST, PADDING, UNCOUNTED, without_marks
from moe_jax.data.tokenizer import BATCH, BpeTokenizer, ByteTokenizer, Document, Tokenizer, encode_documents
from moe_jax.data.tokens import is_text
from moe_jax.errors import DataError
from moe_jax.files.untrusted import read_bytes

Batch = NDArray[np.int32]  # [B, N1]
_MOST_BYTES = 2**32  # of a .txt file


def text_samples(file: Path, data: DataConfig, tokenizer: Tokenizer, setting: str) -> Samples:
    """Return the samples of a whole .txt, .jsonl, .parquet or .array_record file, encoded at once.

    A .txt file is one document. `setting` names the file in messages. Raises DataError.
    """
    tokens = np.array([token for part in _encoded(file, data, tokenizer) for token in part], np.int32)
    if len(tokens) < 2:
        raise DataError(f"{setting}={file} has {len(tokens)} tokens, too few to predict one: give more text")
    end = tokenizer.end_of_text if data.mask_documents and is_text(file) else None
    return Samples(tokens, data.seq_len, end_of_text=end, name=f"{setting}={file}")


def _encoded(file: Path, data: DataConfig, tokenizer: Tokenizer) -> Iterator[list[int]]:
    documents: Iterable[Document]
    if is_text(file):
        documents = ((text, True) for _, text in open_documents(file, data.text_key))
    else:
        try:
            documents = [(read_bytes(file, _MOST_BYTES).decode("utf-8-sig"), False)]  # with its line breaks
        except UnicodeDecodeError:
            raise DataError(f"{file} is not UTF-8 text: convert it, e.g. with iconv") from None
    waiting: list[Document] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document[0])
        if size >= BATCH:
            yield from encode_documents(waiting, tokenizer)
            waiting, size = [], 0
    yield from encode_documents(waiting, tokenizer)


def spread_batches(samples: Samples, batch_size: int, count: int) -> Iterator[Batch]:
    """Yield at most `count` batches, spread evenly over the samples: those of validation during training.

    Raises DataError.
    """
    yield from validation_batches(samples, batch_size=batch_size, num_batches=count, rows=[range(batch_size)])


def all_batches(samples: Samples, batch_size: int) -> Iterator[Batch]:
    """Yield batches in which each token but the first is predicted once.

    The last rows are filled with tokens that are marked as padding, so the config needs `data.mask_documents`.
    """
    numbers = range(len(samples))
    for first in range(0, len(samples) - batch_size + 1, batch_size):
        yield samples.read(numbers[first : first + batch_size])
    left = numbers[len(samples) // batch_size * batch_size :]
    rows, rest = samples.read(left), samples.rest()
    if len(rest) < 2 and not len(left):
        return
    batch = np.full((batch_size, samples.seq_len + 1), np.int32(UNCOUNTED) | np.int32(PADDING - (1 << 32)), np.int32)
    batch[: len(rows)] = rows
    if len(rest) > 1:
        batch[len(rows), : len(rest)] = rest
    yield batch


def text_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 text of the predicted tokens that the loss counts, as the tokenizer decodes them.

    Tokens that begin or end a text have none.
    """
    marked, token_BN1 = batch[:, 1:] & (FIRST | UNCOUNTED), without_marks(batch)
    is_text_BN = marked == 0
    apart = {*tokenizer.begin_of_text, _end_of(tokenizer)}
    is_text_BN &= ~np.isin(token_BN1[:, 1:], [token for token in apart if token is not None])
    if isinstance(tokenizer, ByteTokenizer):
        return int(is_text_BN.sum())
    if isinstance(tokenizer, BpeTokenizer) and (sizes := tokenizer.bytes_of_tokens) is not None:
        return int(sizes[token_BN1[:, 1:][is_text_BN]].sum())
    return sum(_decoded_bytes(row, is_text, tokenizer) for row, is_text in zip(token_BN1, is_text_BN, strict=True))


def _decoded_bytes(token_N1: NDArray[np.int32], is_text_N: NDArray[np.bool], tokenizer: Tokenizer) -> int:
    """The bytes of the text of some tokens of a row: each span of them is decoded after the token before it, since a
    tokenizer may omit the space before the first one.
    """
    edges = np.flatnonzero(np.diff(is_text_N.astype(np.int8), prepend=0, append=0))
    total = 0
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        with_before = token_N1[first : end + 1].tolist()
        total += len(tokenizer.decode(with_before).encode()) - len(tokenizer.decode(with_before[:1]).encode())
    return total


def _end_of(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.end_of_text
    except DataError:
        return None
