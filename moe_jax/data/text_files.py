"""Text files: finding them in a folder tree and reading each as a stream of documents."""

import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from moe_jax.data.array_record_files import ArrayRecords, features_of
from moe_jax.data.saved_dataset import arrow_columns, arrow_files, no_arrow
from moe_jax.data.tokenizer import optional_package
from moe_jax.data.tokens import (
    DATASET_DICT,
    ENCODING_BYTES,
    META_FILE,
    check_has_one_split,
    check_utf8,
    is_saved_dataset,
)
from moe_jax.errors import DataError
from moe_jax.files.untrusted import parse_json

Piece = str | None  # a part of a document's text; None marks the end of the document

_PIECE_CHARACTERS = 2**16  # of a .txt file, read at once
_MAX_LIST_BYTES = 2**28  # of a file with a JSON list, which is parsed as a whole
_GZIP = ".gz"


def find_files(source: Path) -> tuple[list[Path], list[str]]:
    """All text files below a folder (or the single file `source`), sorted, and the skipped entries with the reason.

    Links are followed; each folder is visited once. Raises DataError if there is no text file, or if a folder or file
    cannot be read.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist: name a folder or a {_KINDS} file")
    check_has_one_split(source, str(source))
    if is_saved_dataset(source):
        return arrow_files(source), []
    files, skipped = _walk(source) if source.is_dir() else ([source] if _kind(source) else [], [])
    if not files:
        others = f" (skipped: {'; '.join(skipped[:3])}{'; …' if len(skipped) > 3 else ''})" if skipped else ""
        raise DataError(f"{source} holds no {_KINDS} file{others}: convert the text to one of them")
    for file in files:
        if not file.is_file():
            what = "neither a file nor a folder" if file.exists() else "a link to what does not exist"
            raise DataError(f"{file} is {what}: remove it, or name another file or folder")
    return sorted(files), sorted(skipped)


def read_file(file: Path, text_key: str) -> Iterator[Piece]:
    """Yield the documents of a file found by `find_files`. Raises DataError if its content is not of that kind."""
    kind = _kind(file)
    assert kind is not None, file
    return _READERS[kind](file, text_key)


def has_records(file: Path) -> bool:
    """Whether a file found by `find_files` has JSON objects."""
    return _kind(file) in _RECORD_READERS


def read_records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield where each JSON object of a file is, for messages, and its value.

    Raises DataError if the content is no JSON.
    """
    kind = _kind(file)
    assert kind is not None, file
    return _RECORD_READERS[kind](file)


def _walk(source: Path) -> tuple[list[Path], list[str]]:
    """All text files below a folder, and the skipped entries with the reason."""
    files: list[Path] = []
    skipped: list[str] = []
    folders, visited = [source], {_identity(source): source}
    while folders:
        for path in _entries(folders.pop()):
            name = path.relative_to(source).as_posix()
            if path.name.startswith("."):
                skipped.append(f"{name} (hidden)")
            elif not (identity := _identity(path)):
                if _kind(path):
                    files.append(path)
                else:
                    skipped.append(f"{name} (not a kind of file that is read)")
            elif (path / META_FILE).exists() and (path / "train.bin").exists():
                skipped.append(f"{name} (a prepared folder of tokens)")
            elif is_saved_dataset(path) or (path / DATASET_DICT).exists():
                skipped.append(f"{name} (a saved dataset, to be prepared alone)")
            elif identity in visited:
                skipped.append(f"{name} (the same folder as {visited[identity]})")
            else:
                visited[identity] = path
                folders.append(path)
    return files, skipped


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, links last: a folder is then visited by its own name and not by that of a link to it.

    Raises DataError.
    """
    try:
        with os.scandir(folder) as entries:
            return [folder / name for _, name in sorted((entry.is_symlink(), entry.name) for entry in entries)]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and inode numbers of a folder; None if the path is not a folder."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a dangling link
            return None
        raise _unreadable(path, error) from None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}): make it readable, or move it away")


@contextmanager
def opened_bytes(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed. Raises DataError if it is damaged or not UTF-8."""
    try:
        compressed = file.name.lower().endswith(_GZIP)
        with cast(IO[bytes], gzip.open(file, "rb") if compressed else file.open("rb")) as opened:
            check_utf8(file, opened.read(ENCODING_BYTES))
            opened.seek(0)
            yield opened
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 ({error.reason}): convert it, e.g. with iconv -f latin1 -t utf-8"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be unpacked ({error}): make or copy it again") from None
    except OSError as error:
        raise _unreadable(file, error) from None


def _read_txt(file: Path, text_key: str) -> Iterator[Piece]:
    """A .txt file is one document."""
    empty = True
    with opened_bytes(file) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as lines:
        # read on to the end of a line if it is near, so that a BPE is trained on complete words
        while piece := lines.read(_PIECE_CHARACTERS) + lines.readline(_PIECE_CHARACTERS):
            empty = False
            yield piece
    if not empty:
        yield None


def _read_jsonl(file: Path, text_key: str) -> Iterator[Piece]:
    """A .jsonl file has one JSON object per line, each with one document."""
    for where, record in _jsonl_records(file):
        yield from _record(where, text_key, record)


def _read_json(file: Path, text_key: str) -> Iterator[Piece]:
    """A .json file is a list of objects, or has one object per line."""
    for where, record in _json_records(file):
        yield from _record(where, text_key, record)


def _jsonl_records(file: Path) -> Iterator[tuple[str, Any]]:
    with opened_bytes(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, parsed(where, line)


def _json_records(file: Path) -> Iterator[tuple[str, Any]]:
    with opened_bytes(file) as opened:
        begin = next((line for line in opened if line.strip()), b"")
        if not begin.decode("utf-8-sig").lstrip().startswith("["):
            yield from _jsonl_records(file)
            return
        opened.seek(0)
        content = opened.read(_MAX_LIST_BYTES + 1)
    if len(content) > _MAX_LIST_BYTES:
        raise DataError(
            f"{file} is a list of more than {_MAX_LIST_BYTES >> 20} MiB: "
            f"write one object a line, e.g. with jq -c '.[]' {file} > NEW.jsonl"
        )
    for number, record in enumerate(parsed(str(file), content), start=1):
        yield f"{file}, item {number}", record


def parsed(where: str, text: bytes) -> Any:
    """The value of a JSON text in UTF-8; `where` is for messages. Raises DataError or UnicodeDecodeError."""
    try:
        return parse_json(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): repair or remove it") from None


def _record(where: str, text_key: str, record: object) -> Iterator[Piece]:
    """The document in a JSON object. Raises DataError; `where` names the record in its message."""
    if text := text_of_record(where, text_key, record):
        yield text
        yield None


def text_of_record(where: str, text_key: str, record: object, option: str = "--text-key") -> str:
    """The text in a JSON object, "" for null. `where` and `option`, which sets the key, are for messages.

    Raises DataError.
    """
    if not isinstance(record, dict):
        raise DataError(f'{where} is not a JSON object: write {{"{text_key}": "…"}}')
    check_key(where, text_key, record, option)
    return checked_text(where, text_key, record[text_key], option)


def text_of_array_record(where: str, text_key: str, record: bytes, option: str = "--text-key") -> str:
    """The text in a record of an .array_record file, a JSON object or a tf.train.Example. Raises DataError."""
    try:
        found = parsed(where, record) if record.startswith(b"{") else features_of(where, record)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason}): repair or remove it") from None
    return text_of_record(where, text_key, found, option)


def _read_array_records(file: Path, text_key: str) -> Iterator[Piece]:
    """An .array_record file has one document per record."""
    records = ArrayRecords(file)
    for index in range(len(records)):
        if text := text_of_array_record(f"{file}, record {index}", text_key, records.read(index)):
            yield text
            yield None


def _read_parquet(file: Path, text_key: str) -> Iterator[Piece]:
    """A .parquet file has one document per row, in the column `text_key`."""
    arrow, parquet = optional_package("pyarrow"), optional_package("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            check_key(str(file), text_key, table.schema_arrow.names)
            for rows in table.iter_batches(batch_size=256, columns=[text_key]):
                for value in rows.column(0).to_pylist():
                    if text := checked_text(str(file), text_key, value):
                        yield text
                        yield None
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise no_parquet(file, error) from None


def no_parquet(file: Path, error: Exception) -> DataError:
    """The error for a file that pyarrow cannot read."""
    reason = str(error).partition("\n")[0]
    return DataError(f"{file} cannot be read as parquet ({reason}): repair or remove it")


def arrow_texts(where: Path, column: Any, text_key: str, option: str = "--text-key") -> Iterator[str]:
    """Yield the texts of a column of an Arrow file, "" for null. Raises DataError."""
    arrow = optional_package("pyarrow")
    try:
        column.validate(full=True)  # pyarrow would follow damaged offsets out of the file
        for value in column.to_pylist():
            yield checked_text(str(where), text_key, value, option)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise no_arrow(where, error) from None


def _read_arrow(file: Path, text_key: str) -> Iterator[Piece]:
    """An .arrow file has one document per row, in the column `text_key`."""
    for column in arrow_columns(file, text_key, lambda names: check_key(str(file), text_key, names)):
        for text in arrow_texts(file, column, text_key):
            if text:
                yield text
                yield None


_READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".array_record": _read_array_records,
    f".txt{_GZIP}": _read_txt,
    f".jsonl{_GZIP}": _read_jsonl,
    f".json{_GZIP}": _read_json,
}
_RECORD_READERS: dict[str | None, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_records,
    ".json": _json_records,
    f".jsonl{_GZIP}": _jsonl_records,
    f".json{_GZIP}": _json_records,
}
_KINDS = ".txt, .jsonl, .json, .parquet, .arrow or .array_record"


def _kind(path: Path) -> str | None:
    """The suffix of a path if it is a supported one, else None."""
    return next((kind for kind in _READERS if path.name.lower().endswith(kind)), None)


def check_key(where: str, text_key: str, keys: Iterable[str], option: str = "--text-key") -> None:
    """Raise DataError if the keys of a record, or the names of columns, have no `text_key`."""
    if text_key not in keys:
        raise DataError(f"{where} has no {text_key!r} but {', '.join(keys) or 'nothing'}: choose with {option}")


def checked_text(where: str, text_key: str, text: object, option: str = "--text-key") -> str:
    """The text of a document, "" for null. Raises DataError."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {type(text).__name__}, not text: choose another with {option}")
    return text
