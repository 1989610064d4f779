"""Text files whose documents can be read in any order: lines of a .jsonl file, rows of a .parquet file or a dataset,
records of an .array_record file.
"""

import functools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_jax.data.array_record_files import ArrayRecords
from moe_jax.data.saved_dataset import arrow_columns, arrow_files
from moe_jax.data.text_files import (
    arrow_texts,
    check_key,
    checked_text,
    no_parquet,
    opened_bytes,
    parsed,
    text_of_array_record,
    text_of_record,
)
from moe_jax.data.tokenizer import optional_package
from moe_jax.data.tokens import is_saved_dataset
from moe_jax.errors import DataError
from moe_jax.files.untrusted import check_regular

_OPTION = "data.text_key"
_CACHED_GROUPS = 4  # row groups in memory
_MOST_GROUP_BYTES = 2**28  # of the text in a row group, which is decoded as a whole
_CHANGED = "has changed since its tokens were counted: start again when nothing writes there"


class DocumentSpan(NamedTuple):
    """Where a document is: the first byte of its line and their number, or the number of its row or record and 1."""

    first: int
    length: int


class Documents(Protocol):
    """The documents of a text file; empty ones are left out. Methods are thread-safe, and raise DataError."""

    file: Path  # or the folder of a dataset

    @property
    def files(self) -> list[Path]:
        """The files with the documents."""

    def __iter__(self) -> Iterator[tuple[DocumentSpan, str]]:
        """Yield all documents in order, each with its place."""

    def read(self, place: DocumentSpan) -> str:
        """Return the document at a place."""


def open_documents(file: Path, text_key: str) -> Documents:
    """Open what `is_text` accepts. `text_key` is the field or the column with the text. Raises DataError."""
    if is_saved_dataset(file):
        return ArrowDocuments(file, text_key)
    try:
        check_regular(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    match file.suffix.lower():
        case ".parquet":
            return ParquetDocuments(file, text_key)
        case ".array_record":
            return ArrayRecordDocuments(file, text_key)
    return JsonDocuments(file, text_key)


class JsonDocuments:
    """The documents of a .jsonl file: a JSON object a line."""

    def __init__(self, file: Path, text_key: str):
        self.file, self._key = file, text_key
        with opened_bytes(file):  # raises for text that is not UTF-8
            pass
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def files(self) -> list[Path]:
        return [self.file]

    def __iter__(self) -> Iterator[tuple[DocumentSpan, str]]:
        first = 0
        with opened_bytes(self.file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (text := self._text(f"{self.file}, line {number}", line)):
                    yield DocumentSpan(first, len(line)), text
                first += len(line)

    def read(self, place: DocumentSpan) -> str:
        line = os.pread(self._descriptor, place.length, place.first)
        try:
            return self._text(f"{self.file}, byte {place.first}", line)
        except (DataError, UnicodeDecodeError):
            raise DataError(f"{self.file} {_CHANGED}") from None

    def _text(self, where: str, line: bytes) -> str:
        return text_of_record(where, self._key, parsed(where, line), _OPTION)


class ArrayRecordDocuments:
    """The documents of an .array_record file: one a record."""

    def __init__(self, file: Path, text_key: str):
        self.file, self._key, self._records = file, text_key, ArrayRecords(file)

    @property
    def files(self) -> list[Path]:
        return [self.file]

    def __iter__(self) -> Iterator[tuple[DocumentSpan, str]]:
        for index in range(len(self._records)):
            place = DocumentSpan(index, 1)
            if text := self.read(place):
                yield place, text

    def read(self, place: DocumentSpan) -> str:
        where = f"{self.file}, record {place.first}"
        return text_of_array_record(where, self._key, self._records.read(place.first), _OPTION)


class ParquetDocuments:
    """The documents of a .parquet file: one a row. A row is read with all others of its row group."""

    def __init__(self, file: Path, text_key: str):
        self.file, self._key, self._lock = file, text_key, threading.Lock()
        self._arrow, parquet = optional_package("pyarrow"), optional_package("pyarrow.parquet")
        try:
            self._table = parquet.ParquetFile(file)
        except (self._arrow.ArrowException, OSError) as error:
            raise no_parquet(file, error) from None
        check_key(str(file), text_key, self._table.schema_arrow.names, _OPTION)
        groups = [self._table.metadata.row_group(number) for number in range(self._table.num_row_groups)]
        self._ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        for number, group in enumerate(groups):
            columns = (group.column(index) for index in range(group.num_columns))
            size = sum(each.total_uncompressed_size for each in columns if each.path_in_schema == text_key)
            if size > _MOST_GROUP_BYTES:
                raise DataError(
                    f"{file} has {size:,} bytes of text in row group {number}, more than the {_MOST_GROUP_BYTES:,} "
                    "that are decoded for one row: write smaller row groups, or prepare it with scripts/prepare_text.py"
                )
        self._group = functools.lru_cache(maxsize=_CACHED_GROUPS)(self._read_group)

    @property
    def files(self) -> list[Path]:
        return [self.file]

    def __iter__(self) -> Iterator[tuple[DocumentSpan, str]]:
        row = 0
        for number in range(len(self._ends)):
            for value in self._read_group(number).to_pylist():
                if text := checked_text(str(self.file), self._key, value, _OPTION):
                    yield DocumentSpan(row, 1), text
                row += 1

    def read(self, place: DocumentSpan) -> str:
        number = int(np.searchsorted(self._ends, place.first, "right"))
        with self._lock:
            group = self._group(number)
        text: str = group[place.first - (int(self._ends[number - 1]) if number else 0)].as_py()
        return text

    def _read_group(self, number: int) -> Any:
        """The column with the text in a row group."""
        try:
            return self._table.read_row_group(number, columns=[self._key]).column(0)
        except (self._arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise no_parquet(self.file, error) from None


class ArrowDocuments:
    """The documents of a dataset that was saved to disk: one a row of its Arrow files, which are mapped into memory."""

    def __init__(self, file: Path, text_key: str):
        self.file, self._key, self.files = file, text_key, arrow_files(file)
        self._batches = [batch for each in self.files for batch in arrow_columns(each, text_key, self._check)]
        self._ends = np.cumsum([len(batch) for batch in self._batches], dtype=np.int64)

    def __iter__(self) -> Iterator[tuple[DocumentSpan, str]]:
        for number, batch in enumerate(self._batches):
            first = self._first_row(number)
            for row, text in enumerate(arrow_texts(self.file, batch, self._key, _OPTION), first):
                if text:
                    yield DocumentSpan(row, 1), text

    def read(self, place: DocumentSpan) -> str:
        number = int(np.searchsorted(self._ends, place.first, "right"))
        row = place.first - self._first_row(number)
        return next(arrow_texts(self.file, self._batches[number][row : row + 1], self._key, _OPTION))

    def _check(self, names: Sequence[str]) -> None:
        check_key(str(self.file), self._key, names, _OPTION)

    def _first_row(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0
