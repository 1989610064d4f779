"""Conversion of text files to a folder of tokens. The text is streamed: at most one document is in memory at a time."""

import itertools
import json
import math
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from moe_jax.data.byte_level import is_byte_level
from moe_jax.data.chunk_checksums import CHUNK_BYTES, write_checksums
from moe_jax.data.text_files import Piece, find_files, read_file
from moe_jax.data.tokenizer import BATCH as _BATCH
from moe_jax.data.tokenizer import (
    MIN_BPE_VOCAB_SIZE,
    BpeTokenizer,
    ByteTokenizer,
    Document,
    Tokenizer,
    encode_documents,
    load_model_tokenizer,
    model_tokenizer_file,
    optional_package,
    train_bpe,
)
from moe_jax.data.tokens import BPE_FILE, FORMAT, META_FILE, Meta, Split
from moe_jax.errors import DataError
from moe_jax.files.atomic import write_folder_atomically

MAX_BPE_VOCAB_SIZE = 2**20

_MAX_PRINTED = 20  # names of skipped files
_BPE_SAMPLE = 2**28  # characters that a BPE is trained on: the trainer's memory grows with distinct words


def prepare_text(
    source: Path,
    output: Path,
    *,
    tokenizer: Literal["bytes", "bpe"] | Path = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = 0.1,
    text_key: str = "text",
) -> Meta:
    """Write the tokens of all text files below `source` (data/text_files.py) as the folder `output`.

    Documents are in the sorted order of their files; the last `validation_fraction` of all characters is for
    validation. Skipped files are printed, and listed in the folder's meta.json. `tokenizer` may be the folder of a
    Hugging Face model with a tokenizer.json, or the path of such a file. `vocab_size` is that of a new BPE, 8192 if
    None. `text_key` is the field or column with the text in JSON and parquet files. Raises DataError for bad input, and
    then leaves no `output`.
    """
    _check_options(tokenizer, vocab_size, validation_fraction)
    if isinstance(tokenizer, Path) and is_byte_level(model_tokenizer_file(tokenizer)):
        tokenizer = "bytes"
    of_model = load_model_tokenizer(tokenizer) if isinstance(tokenizer, Path) else None
    if of_model:
        _ = of_model[1].end_of_text  # raises before hours of reading
    files, skipped = find_files(source)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder: name another one, or remove it")

    def pieces() -> Iterator[Piece]:
        for file in files:
            yield from read_file(file, text_key)

    for name in skipped[:_MAX_PRINTED]:
        print(f"skipped: {name}", flush=True)
    if len(skipped) > _MAX_PRINTED:
        print(f"skipped: {len(skipped) - _MAX_PRINTED} more, listed in {output / META_FILE}", flush=True)
    try:
        characters, surrogates = _counts(pieces())
        num_train = characters - int(characters * validation_fraction)
        if not 0 < num_train < characters:
            raise DataError(
                f"{source} holds {characters} characters, too few to train and validate with --validation-fraction="
                f"{validation_fraction:g}: give more text, or a larger fraction"
            )
        with write_folder_atomically(output) as folder:
            encoder: Tokenizer = ByteTokenizer()
            if tokenizer == "bpe":
                train = (piece for _, piece in itertools.takewhile(_is_train, _split(pieces(), num_train)) if piece)
                sample = itertools.islice(train, 0, None, math.ceil(num_train / _BPE_SAMPLE))
                encoder = train_bpe(sample, vocab_size or 8192, folder / BPE_FILE)
            elif of_model:
                tokenizer_file, encoder = of_model
                shutil.copyfile(tokenizer_file, folder / BPE_FILE)
            kind = tokenizer if isinstance(tokenizer, str) else "bpe"
            names = [file.name if file == source else file.relative_to(source).as_posix() for file in files]
            read = _split(_with_progress(pieces(), characters, source), num_train)
            meta = _write(folder, read, kind, encoder, names, skipped)
        if surrogates:
            print(f"warning: {surrogates:,} lone surrogates, which no text may hold, are question marks", flush=True)
    except OSError as error:
        raise DataError(f"{error.filename or output}: {error.strerror or error}") from None
    return meta


def _check_options(tokenizer: str | Path, vocab_size: int | None, validation_fraction: float) -> None:
    """Raise DataError for invalid options."""
    if not 0 < validation_fraction < 1:
        raise DataError(f"--validation-fraction={validation_fraction} must lie between 0 and 1")
    if tokenizer == "bpe":
        optional_package("tokenizers")  # before hours of reading
    if vocab_size is None:
        return
    if tokenizer != "bpe":
        fixed = "bytes always have 256 tokens" if tokenizer == "bytes" else f"{tokenizer} has its own tokens"
        raise DataError(f"--vocab-size={vocab_size} is for --tokenizer=bpe; {fixed}")
    if not MIN_BPE_VOCAB_SIZE <= vocab_size <= MAX_BPE_VOCAB_SIZE:
        raise DataError(f"--vocab-size={vocab_size} must lie in {MIN_BPE_VOCAB_SIZE}..{MAX_BPE_VOCAB_SIZE}")


def _counts(pieces: Iterable[Piece]) -> tuple[int, int]:
    """Return the number of characters, and how many of them are halves of a surrogate pair, each without the other."""
    characters = surrogates = 0
    for piece in filter(None, pieces):
        characters += len(piece)
        try:
            piece.encode()
        except UnicodeEncodeError:
            surrogates += sum("\ud800" <= character <= "\udfff" for character in piece)
    return characters, surrogates


def _split(pieces: Iterable[Piece], num_train: int) -> Iterator[tuple[Split, Piece]]:
    """Label each piece with its split. The first `num_train` characters are for training; a piece may be divided."""
    position = 0
    for piece in pieces:
        if piece is None:
            yield ("train" if position <= num_train else "validation"), None
            continue
        inside = max(num_train - position, 0)
        if piece[:inside]:
            yield "train", piece[:inside]
        if piece[inside:]:
            yield "validation", piece[inside:]
        position += len(piece)


def _is_train(item: tuple[Split, Piece]) -> bool:
    return item[0] == "train"


def _with_progress(pieces: Iterable[Piece], characters: int, source: Path) -> Iterator[Piece]:
    """Yield the pieces while a progress bar is shown. Raises DataError if they do not add up to `characters`."""
    left = characters
    with tqdm(total=characters, unit="char", unit_scale=True, disable=None) as bar:
        for piece in pieces:
            left -= len(piece or "")
            bar.update(len(piece or ""))
            yield piece
    if left:
        raise DataError(f"{source} has changed while it was read: start again when nothing writes there")


def _write(
    folder: Path,
    pieces: Iterator[tuple[Split, Piece]],
    kind: str,
    tokenizer: Tokenizer,
    sources: list[str],
    skipped: list[str],
) -> Meta:
    """Encode labelled pieces; writes the token files, their checksums and meta.json into `folder`."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    sizes: dict[str, int] = {}
    unknown = tokenizer.unknown() if isinstance(tokenizer, BpeTokenizer) else None
    unknowns = 0
    for split, group in itertools.groupby(pieces, key=itemgetter(0)):
        count = crc32 = 0
        with (folder / f"{split}.bin").open("wb") as out:
            for tokens in _encode((piece for _, piece in group), tokenizer):
                data = np.asarray(tokens, dtype.newbyteorder("<")).tobytes()
                out.write(data)
                unknowns += 0 if unknown is None else tokens.count(unknown)
                count, crc32 = count + len(tokens), zlib.crc32(data, crc32)
        write_checksums(folder / f"{split}.bin")
        sizes |= {f"{split}_tokens": count, f"{split}_crc32": crc32}
    meta = Meta(
        tokenizer=kind,
        vocab_size=tokenizer.vocab_size,
        begin_of_text=tokenizer.begin_of_text,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype.name,
        sources=sources,
        skipped=skipped,
        tokenizer_crc32=zlib.crc32((folder / BPE_FILE).read_bytes()) if kind == "bpe" else None,
        chunk_bytes=CHUNK_BYTES,
        **sizes,
    )
    if isinstance(tokenizer, BpeTokenizer) and unknowns and unknown is not None:
        share = f"{unknowns:,} of {meta.train_tokens + meta.validation_tokens:,} tokens"
        print(f"warning: {share} are {tokenizer.name_of(unknown)}, for what the tokenizer does not know", flush=True)
    elif unknown == -1:
        print("warning: the tokenizer leaves out characters that it does not know", flush=True)
    (folder / META_FILE).write_text(json.dumps({"format": FORMAT} | asdict(meta), indent=1) + "\n")
    return meta


def _encode(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each document, as if it were encoded at once, with those that begin and end a text around it.

    The last document gets no end token if its pieces do not end with None.
    """
    waiting: list[Document] = []  # to be encoded in one call
    document: list[str] = []
    size = length = 0  # characters of the waiting documents, and of the current one
    for piece in pieces:
        if piece is None:
            waiting.append(("".join(document), True))
            size, document, length = size + length, [], 0
            if size >= _BATCH:
                yield from encode_documents(waiting, tokenizer)
                waiting, size = [], 0
            continue
        document.append(piece)
        length += len(piece)
        if length > _BATCH:
            yield from encode_documents(waiting, tokenizer)
            yield from _encode_long(itertools.chain(document, pieces), tokenizer)
            waiting, size, document, length = [], 0, [], 0
    if document:
        waiting.append(("".join(document), False))
    yield from encode_documents(waiting, tokenizer)


def _encode_long(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of the first document in `pieces`, and consume only this document."""
    ended = False

    def document() -> Iterator[str]:
        nonlocal ended
        for piece in pieces:
            if piece is None:
                ended = True
                return
            yield piece

    yield tokenizer.begin_of_text
    yield from tokenizer.encode_long(document())
    if ended:
        yield [tokenizer.end_of_text]
