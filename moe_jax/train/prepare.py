"""Text files → a folder of tokens, read as a stream: memory holds one document or piece, never the corpus."""

import itertools
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from moe_jax.errors import DataError
from moe_jax.foreign_files import check_regular, parse_json
from moe_jax.train.token_chunks import CHUNK_BYTES, write_checksums
from moe_jax.train.tokenizer import (
    BPE_FILE,
    MIN_BPE_VOCAB_SIZE,
    ByteTokenizer,
    Tokenizer,
    of_model,
    optional_package,
    train_bpe,
)
from moe_jax.train.tokens import FORMAT, META_FILE, Meta, Split

Piece = str | None  # of a document; None ends the document

MAX_BPE_VOCAB_SIZE = 2**20

_PIECE = 2**16  # characters of a .txt file read at once
_BATCH = 2**20  # characters encoded at once
_BPE_SAMPLE = 2**28  # characters that a BPE learns from: the trainer's memory grows with distinct words


def prepare_text(
    source: Path,
    output: Path,
    *,
    tokenizer: Literal["bytes", "bpe"] | Path = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.1,
    text_key: str = "text",
) -> Meta:
    """Write the tokens of all .txt, .jsonl and .parquet files below `source` as the folder `output`.

    Documents keep the sorted order of their files; the last `validation_fraction` of all characters validates.
    `tokenizer` may be the folder of a Hugging Face model with a tokenizer.json, or this file. `vocab_size` is that of a
    new BPE, 8192 if None. Raises DataError for bad input, and then leaves no `output`.
    """
    _check_options(tokenizer, vocab_size, validation_fraction)
    of_another = of_model(tokenizer) if isinstance(tokenizer, Path) else None
    files = find_files(source)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder: name another one, or remove it")

    def pieces() -> Iterator[Piece]:
        for file in files:
            yield from _READERS[file.suffix.lower()](file, text_key)

    try:
        characters = sum(len(piece) for piece in pieces() if piece)
        cut = characters - int(characters * validation_fraction)
        if not 0 < cut < characters:
            raise DataError(f"{source} holds {characters} characters, too few to train and validate: give more text")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
            folder = Path(scratch) / "tokens"
            folder.mkdir()
            encoder: Tokenizer = ByteTokenizer()
            if tokenizer == "bpe":
                train = (piece for _, piece in itertools.takewhile(_trains, _split(pieces(), cut)) if piece)
                sample = itertools.islice(train, 0, None, math.ceil(cut / _BPE_SAMPLE))
                encoder = train_bpe(sample, vocab_size or 8192, folder / BPE_FILE)
            elif of_another:
                tokenizer_file, encoder = of_another
                shutil.copyfile(tokenizer_file, folder / BPE_FILE)
            kind = tokenizer if isinstance(tokenizer, str) else "bpe"
            names = [file.name if file == source else file.relative_to(source).as_posix() for file in files]
            meta = _write(folder, _split(_counted(pieces(), characters), cut), kind, encoder, names)
            folder.rename(output)
    except OSError as error:
        raise DataError(f"{error.filename or output}: {error.strerror or error}") from None
    return meta


def find_files(source: Path) -> list[Path]:
    """All text files below a folder, sorted, or the one file named. Raises DataError if there is none."""
    if not source.exists():
        raise DataError(f"{source} does not exist: name a folder or a {_KINDS} file")
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]
    files = [file for file in files if file.suffix.lower() in _READERS]
    if not files:
        raise DataError(f"{source} holds no {_KINDS} file: convert the text to one of them")
    return files


def _check_options(tokenizer: str | Path, vocab_size: int | None, validation_fraction: float) -> None:
    if not 0 < validation_fraction < 1:
        raise DataError(f"--validation-fraction={validation_fraction} must lie between 0 and 1")
    if tokenizer == "bpe":
        optional_package("tokenizers")  # before hours of reading
    if vocab_size is None:
        return
    if tokenizer != "bpe":
        raise DataError(f"--vocab-size={vocab_size} is for --tokenizer=bpe; {_sizes_of(tokenizer)}")
    if not MIN_BPE_VOCAB_SIZE <= vocab_size <= MAX_BPE_VOCAB_SIZE:
        raise DataError(f"--vocab-size={vocab_size} must lie in {MIN_BPE_VOCAB_SIZE}..{MAX_BPE_VOCAB_SIZE}")


def _sizes_of(tokenizer: str | Path) -> str:
    return "bytes always have 256 tokens" if tokenizer == "bytes" else f"{tokenizer} has its own tokens"


def _read_txt(file: Path, text_key: str) -> Iterator[Piece]:
    check_regular(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            # up to a line's end if one is near, so that a BPE sees whole words
            while piece := lines.read(_PIECE) + lines.readline(_PIECE):
                yield piece
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 ({error.reason}): convert it, e.g. with iconv -f latin1 -t utf-8"
        ) from None
    yield None


def _read_jsonl(file: Path, text_key: str) -> Iterator[Piece]:
    check_regular(file)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON ({error}): repair or remove it") from None
            if not isinstance(record, dict):
                raise DataError(f'{where} is not a JSON object: write {{"{text_key}": "…"}}')
            _check_key(where, text_key, record)
            yield from _document(where, text_key, record[text_key])


def _read_parquet(file: Path, text_key: str) -> Iterator[Piece]:
    arrow, parquet = optional_package("pyarrow"), optional_package("pyarrow.parquet")
    check_regular(file)
    try:
        with parquet.ParquetFile(file) as table:
            _check_key(str(file), text_key, table.schema_arrow.names)
            for rows in table.iter_batches(batch_size=256, columns=[text_key]):
                for text in rows.column(0).to_pylist():
                    yield from _document(str(file), text_key, text)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{file} cannot be read as parquet ({reason}): repair or remove it") from None


_READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
_KINDS = ".txt, .jsonl or .parquet"


def _check_key(where: str, text_key: str, keys: Iterable[str]) -> None:
    if text_key not in keys:
        raise DataError(f"{where} has no {text_key!r} but {', '.join(keys) or 'nothing'}: choose with --text-key")


def _document(where: str, text_key: str, text: object) -> Iterator[Piece]:
    if text is None or text == "":
        return
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {type(text).__name__}, not text: choose another with --text-key")
    yield text
    yield None


def _split(pieces: Iterable[Piece], cut: int) -> Iterator[tuple[Split, Piece]]:
    """Each piece with its side of the character at `cut`, where a piece is divided."""
    position = 0
    for piece in pieces:
        if piece is None:
            yield ("train" if position <= cut else "validation"), None
            continue
        inside = max(cut - position, 0)
        if piece[:inside]:
            yield "train", piece[:inside]
        if piece[inside:]:
            yield "validation", piece[inside:]
        position += len(piece)


def _trains(item: tuple[Split, Piece]) -> bool:
    return item[0] == "train"


def _counted(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    with tqdm(total=characters, unit="char", unit_scale=True, disable=None) as bar:
        for piece in pieces:
            bar.update(len(piece or ""))
            yield piece


def _write(
    folder: Path, pieces: Iterator[tuple[Split, Piece]], kind: str, tokenizer: Tokenizer, sources: list[str]
) -> Meta:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    sizes: dict[str, int] = {}
    for split, group in itertools.groupby(pieces, key=itemgetter(0)):
        count = crc32 = 0
        with (folder / f"{split}.bin").open("wb") as out:
            for tokens in _encode((piece for _, piece in group), tokenizer):
                data = np.asarray(tokens, dtype.newbyteorder("<")).tobytes()
                out.write(data)
                count, crc32 = count + len(tokens), zlib.crc32(data, crc32)
        write_checksums(folder / f"{split}.bin")
        sizes |= {f"{split}_tokens": count, f"{split}_crc32": crc32}
    meta = Meta(
        tokenizer=kind,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype.name,
        sources=sources,
        chunk_bytes=CHUNK_BYTES,
        **sizes,
    )
    (folder / META_FILE).write_text(json.dumps({"format": FORMAT} | asdict(meta), indent=1) + "\n")
    return meta


def _encode(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for batch in _batches(pieces):
        encoded = iter(tokenizer.encode_batch([piece for piece in batch if piece is not None]))
        for piece in batch:
            yield [tokenizer.end_of_text] if piece is None else next(encoded)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece or "")
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
