"""Files of records in any order (array_record, which grain reads), of which each record is a document.

A record is a JSON object, or a `tf.train.Example` of protocol buffers, as TensorFlow Datasets writes them. Either has
the text under a key.
"""

import importlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_jax.errors import DataError

_BYTES, _LIST, _VALUE = 2, 1, 1  # the wire type of strings, and field numbers of an Example's parts


class ArrayRecords:
    """The records of a file. Thread-safe. Raises DataError for a file that is damaged, or of another kind."""

    def __init__(self, file: Path):
        self.file, self._lock = file, threading.Lock()
        try:  # grain installs it where it has packages
            array_record_module = importlib.import_module("array_record.python.array_record_module")
        except ModuleNotFoundError:
            raise DataError(f"{file}: array_record is not installed: pip install array_record") from None
        self._reader: Any = array_record_module.ArrayRecordReader(str(file))
        if not self._reader.ok():
            raise DataError(f"{file} cannot be read as array records: repair or remove it")

    def __len__(self) -> int:
        return int(self._reader.num_records())

    def read(self, index: int) -> bytes:
        """Return one record."""
        try:
            with self._lock:
                (record,) = self._reader.read([index])
        except RuntimeError as error:
            raise DataError(
                f"{self.file}, record {index}, cannot be read ({error}): repair or remove the file"
            ) from None
        return bytes(record)


def features_of(where: str, record: bytes) -> Mapping[str, object]:
    """Return the features of a `tf.train.Example` by name: the text of one string, or a list of what else there is.

    `where` is for messages. Raises DataError.
    """
    found: dict[str, object] = {}
    try:
        for features in _strings(record, 1):
            for entry in _strings(features, 1):
                (name,), (feature,) = _strings(entry, 1), _strings(entry, 2)
                values = [value for each in _strings(feature, _LIST) for value in _strings(each, _VALUE)]
                found[name.decode()] = values[0].decode() if len(values) == 1 else values
    except (ValueError, IndexError):  # of which UnicodeDecodeError is one
        raise DataError(f"{where} is neither a JSON object nor a tf.train.Example: write one of them") from None
    return found


def _strings(message: bytes, field: int) -> list[bytes]:
    """Return the strings or messages of one field of a protocol buffer. Raises ValueError or IndexError."""
    return [value for number, value in _fields(message) if number == field]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each field that is a string or a message, and its bytes."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        kind = key & 7
        if kind == _BYTES:
            size, at = _number(message, at)
            if at + size > len(message):
                raise IndexError("it ends in a field")
            yield key >> 3, message[at : at + size]
        elif kind == 0:
            size, at = 0, _number(message, at)[1]
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Return the number of variable length that begins at a byte, and the byte after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
