"""The tokens of a text file, computed when they are read, and the index of its documents that this needs.

Sequence i of a text is made of tokens i · N to i · N + N. To find them without encoding all documents before them,
the tokens of each document are counted once, and kept in a file next to the text: 24 bytes a document. Its name has a
checksum of everything that the numbers depend on.

D documents of a split; S spans of tokens.
"""

import json
import secrets
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moe_jax.data.documents import Documents, DocumentSpan, open_documents
from moe_jax.data.tokenizer import BATCH, Document, Tokenizer, encode_documents
from moe_jax.data.tokens import SPLITS, Meta, Split
from moe_jax.errors import DataError
from moe_jax.files.atomic import check_writable


@dataclass(frozen=True, eq=False)
class TextTokens:
    """The tokens of one split of a text file: a document after the other, as in a prepared folder."""

    documents: Documents
    tokenizer: Tokenizer
    place_D2: NDArray[np.int64]  # of each document: the two numbers of its DocumentSpan
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
        text, is_last = (
            self.documents.read(DocumentSpan(*self.place_D2[number].tolist())),
            number == len(self.end_D) - 1,
        )
        if is_last and self.kept is not None:
            return text[: self.kept], False
        return (text[self.skipped :] if number == 0 else text), True


_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """The settings on which the tokens of a text file depend."""

    text_key: str
    validation_fraction: float
    tokenizer: Tokenizer
    tokenizer_crc32: int | None  # of tokenizer.json; None for bytes


class _Part(NamedTuple):
    """The index of one split."""

    place_D2: NDArray[np.int64]
    end_D: NDArray[np.int64]  # tokens up to the end of each document
    crc32: NDArray[np.int64]  # of all tokens, in the type in which a prepared folder stores them


class _Index(NamedTuple):
    train: _Part
    validation: _Part
    cut: int  # characters for training of the document that is in both splits; 0: none is


def open_text(file: Path, settings: IndexSettings) -> tuple[TextTokens, TextTokens, Meta]:
    """Return the tokens to train and to validate on, and what describes them, as of a prepared folder.

    The first time, all documents are encoded to count their tokens, which takes as long as to prepare a folder. Raises
    DataError.
    """
    documents = open_documents(file, settings.text_key)
    path = _path_of(documents, settings)
    try:
        index = _load(path)
    except FileNotFoundError:
        index = None
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        print(f"warning: {path} is damaged: the tokens are counted again", file=sys.stderr, flush=True)
        index = None
    if index is None:
        _check_writable(path, file)
        index = _count(documents, settings)
        _save(path, index, file)
    (train, validation, cut), tokenizer = index, settings.tokenizer
    meta = Meta(
        tokenizer="bytes" if settings.tokenizer_crc32 is None else "bpe",
        vocab_size=tokenizer.vocab_size,
        begin_of_text=tokenizer.begin_of_text,
        end_of_text=tokenizer.end_of_text,
        dtype=np.min_scalar_type(tokenizer.vocab_size - 1).name,
        train_tokens=int(train.end_D[-1]),
        train_crc32=int(train.crc32),
        validation_tokens=int(validation.end_D[-1]),
        validation_crc32=int(validation.crc32),
        sources=[each.name for each in documents.files],
        tokenizer_crc32=settings.tokenizer_crc32,
    )
    return (
        TextTokens(documents, tokenizer, train.place_D2, train.end_D, kept=cut or None),
        TextTokens(documents, tokenizer, validation.place_D2, validation.end_D, skipped=cut),
        meta,
    )


def _path_of(documents: Documents, settings: IndexSettings) -> Path:
    """The path of the index of a text with these settings."""
    file, tokenizer = documents.file, settings.tokenizer
    facts = [fact for each in map(Path.stat, documents.files) for fact in (each.st_size, each.st_mtime_ns)]
    key = [_FORMAT, *facts, settings.text_key, settings.validation_fraction]
    key += [settings.tokenizer_crc32, tokenizer.begin_of_text, tokenizer.end_of_text]
    return file.with_name(f".{file.name}.{zlib.crc32(json.dumps(key).encode()):08x}.index.npz")


def _load(path: Path) -> _Index:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as found:
        train, validation = (_Part(*(found[f"{split}_{name}"] for name in _Part._fields)) for split in SPLITS)
        for place_D2, end_D, _ in (train, validation):
            if not len(end_D) or place_D2.shape != (len(end_D), 2) or (np.diff(end_D, prepend=0) < 0).any():
                raise ValueError("its numbers are those of no text")
        return _Index(train, validation, int(found["cut"]))


def _save(path: Path, index: _Index, file: Path) -> None:
    """Write an index, which appears only when it is complete. Raises DataError."""
    parts = zip(SPLITS, (index.train, index.validation), strict=True)
    arrays = {f"{split}_{name}": array for split, part in parts for name, array in part._asdict().items()}
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # other runs may write the same index
    try:
        with scratch.open("wb") as opened:
            np.savez(opened, allow_pickle=False, cut=np.array(index.cut), **arrays)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise _unwritable(path, file, error) from None


def _check_writable(path: Path, file: Path) -> None:
    """Raise DataError, before a text is read, if its index cannot be written."""
    try:
        check_writable(path)
    except OSError as error:
        raise _unwritable(path, file, error) from None


def _unwritable(path: Path, file: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror}): copy {file} to a folder that can be written, or prepare it "
        "with scripts/prepare_text.py"
    )


def _count(documents: Documents, settings: IndexSettings) -> _Index:
    """Encode all documents, and return the index. The splits are those of `prepare_text`. Raises DataError."""
    characters = sum(len(text) for _, text in documents)
    num_train = characters - int(characters * settings.validation_fraction)
    if not 0 < num_train < characters:
        raise DataError(
            f"{documents.file} holds {characters} characters, too few to train and validate with "
            f"data.validation_fraction={settings.validation_fraction:g}: give more text, or a larger fraction"
        )
    print(f"counting the tokens of {documents.file}, once: {characters:,} characters", flush=True)
    counters, cut = {split: _Counter(settings.tokenizer) for split in SPLITS}, 0
    for place, parts in _with_parts(documents, num_train, characters):
        if len(parts) == len(SPLITS):
            cut = len(parts["train"][0])
        for split, document in parts.items():
            counters[split].add(place, document)
    train, validation = (counters[split].part() for split in SPLITS)
    return _Index(train, validation, cut)


def _with_parts(
    documents: Documents, num_train: int, characters: int
) -> Iterator[tuple[DocumentSpan, dict[Split, Document]]]:
    """Yield each document's place, and its text by split: the one at the boundary is in both."""
    position = 0
    with tqdm(total=characters, unit="char", unit_scale=True, disable=None) as bar:
        for place, text in documents:
            inside = num_train - position
            if inside >= len(text):
                yield place, {"train": (text, True)}
            elif inside <= 0:
                yield place, {"validation": (text, True)}
            else:
                yield place, {"train": (text[:inside], False), "validation": (text[inside:], True)}
            position += len(text)
            bar.update(len(text))


class _Counter:
    """Counts the tokens of one split's documents, several in each call of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._dtype = tokenizer, np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
        self._spans: list[DocumentSpan] = []
        self._counts: list[int] = []
        self._waiting: list[Document] = []
        self._size = self._crc32 = 0

    def add(self, place: DocumentSpan, document: Document) -> None:
        """Count a document, now or with later ones."""
        self._spans.append(place)
        self._waiting.append(document)
        self._size += len(document[0])
        if self._size >= BATCH:
            self._encode()

    def part(self) -> _Part:
        """Return the index of all documents that were added."""
        self._encode()
        places, ends = np.array(self._spans, np.int64).reshape(-1, 2), np.cumsum(self._counts, dtype=np.int64)
        return _Part(places, ends, np.array(self._crc32))

    def _encode(self) -> None:
        for tokens in encode_documents(self._waiting, self._tokenizer):
            self._counts.append(len(tokens))
            self._crc32 = zlib.crc32(np.asarray(tokens, self._dtype).tobytes(), self._crc32)
        self._waiting, self._size = [], 0
