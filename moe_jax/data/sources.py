"""The sources of a run: token files, and text files that are encoded while the run trains."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_jax.config import DataConfig
from moe_jax.data.byte_level import is_byte_level
from moe_jax.data.chunk_checksums import ChunkChecksums
from moe_jax.data.documents import open_documents
from moe_jax.data.text_index import IndexSettings, TextTokens, open_text
from moe_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_model_tokenizer, load_tokenizer, model_tokenizer_file
from moe_jax.data.tokens import (
    BPE_FILE,
    BYTES_VOCAB_SIZE,
    ENCODING_BYTES,
    SPLITS,
    Meta,
    TokenArray,
    check_tokenizer_file,
    check_utf8,
    chunk_checksums,
    find_data,
    is_saved_dataset,
    is_text,
    map_file,
    open_split,
    read_meta,
)
from moe_jax.errors import DataError
from moe_jax.files.local_copy import local_outline
from moe_jax.files.untrusted import MOST_TOKENIZER, read_bytes
from moe_jax.paths import is_bucket_url


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one source, all below `vocab_size`: mapped into memory, or encoded when they are read."""

    train: TokenArray | TextTokens
    validation: TokenArray | TextTokens
    vocab_size: int
    path: Path
    setting: str  # the name of the setting with the path, for messages
    train_chunks: ChunkChecksums | None = None  # verifies tokens when read; None: a text, or verified before
    validation_chunks: ChunkChecksums | None = None
    meta: Meta | None = None  # None for a .txt file

    @property
    def is_packed(self) -> bool:
        """Whether the tokens are sequences of `seq_len + 1` tokens with marks, not one stream."""
        return self.meta is not None and self.meta.seq_len is not None


def tokenizer_file(data: DataConfig, number: int = 0) -> Path | None:
    """Return the tokenizer.json of source `number`; None for bytes. Raises DataError if it is not the source's own."""
    source = data.mixture[number]
    if is_text(source.path):
        if data.tokenizer == "bytes":
            return None
        file = model_tokenizer_file(local_outline(data.tokenizer), "data.tokenizer")
        return None if is_byte_level(file) else file
    setting = data.path_names[number]
    path = find_data(local_outline(source.path), setting)
    if not path.is_dir():
        return None
    meta = read_meta(path, setting)
    check_tokenizer_file(path, meta)
    return None if meta.tokenizer == "bytes" else path / BPE_FILE


def source_tokenizer(data: DataConfig, number: int = 0) -> Tokenizer:
    """Return the tokenizer of source `number`. Raises DataError."""
    source = data.mixture[number]
    if not is_text(source.path):
        return load_tokenizer(find_data(local_outline(source.path), data.path_names[number]))
    file = tokenizer_file(data, number)
    return load_model_tokenizer(file)[1] if file else ByteTokenizer()


def open_tokens(data: DataConfig, vocab_size: int, names: Sequence[str] | None = None) -> tuple[Tokens, ...]:
    """Open the tokens of each source, for a model of `vocab_size` tokens.

    `names` are those of the sources' paths in messages, by default the settings.

    The tokens of a new text file are counted here, which takes as long as to prepare it. Only folders without checksums
    of chunks, which older versions made, are read and verified here. Raises DataError if tokens are missing, damaged,
    of a larger vocabulary, or too few for one sequence, if `data.mask_documents` is set for a .txt file, or if no
    source is a text that `data.tokenizer` could encode.
    """
    numbered = list(enumerate(names or data.path_names))
    for number, setting in numbered:  # before the tokens of any text are counted
        _check_source(number, data, vocab_size, setting)
    for name in ("tokenizer", "text_key"):
        value, unset = getattr(data, name), getattr(DataConfig, name)
        if value != unset and not any(is_text(source.path) for source in data.mixture):
            raise DataError(
                f"data.{name}={value} is for .jsonl, .parquet and .array_record files and saved datasets, and no "
                f"source is one: use data.{name}={unset}"
            )
    return tuple(_open_source(number, data, setting) for number, setting in numbered)


def _check_source(number: int, data: DataConfig, vocab_size: int, setting: str) -> None:
    """Raise DataError for a source with tokens that the model does not know, or without text that can be read."""
    path = find_data(data.mixture[number].path, setting)
    if data.mask_documents and path.suffix == ".txt" and not path.is_dir():
        raise DataError(
            f"data.mask_documents=true, and {setting}={path} is one document: prepare a folder of documents with "
            "scripts/prepare_text.py, or use data.mask_documents=false"
        )
    needed = BYTES_VOCAB_SIZE
    if is_saved_dataset(path) and is_bucket_url(data.mixture[number].path):
        raise DataError(
            f"{setting}={data.mixture[number].path} is a dataset in a bucket: copy it to a disk, or make a folder with "
            "scripts/prepare_text.py"
        )
    if is_text(path):
        needed = source_tokenizer(data, number).vocab_size
        next(iter(open_documents(path, data.text_key)), None)
    elif path.is_dir():
        needed = read_meta(path, setting).vocab_size
    if needed > vocab_size:
        raise DataError(
            f"{setting}={path} has a vocabulary of {needed} tokens, more than model.vocab_size={vocab_size}: "
            f"set model.vocab_size={needed}, or name text in the tokens of the model, if that is trained already"
        )


def _open_source(number: int, data: DataConfig, setting: str) -> Tokens:
    """Open the tokens of one source that was checked. Raises DataError."""
    path = find_data(data.mixture[number].path, setting)
    chunks: list[ChunkChecksums | None] = [None, None]
    meta = None
    train: TokenArray | TextTokens
    validation: TokenArray | TextTokens
    if is_text(path):
        train, validation, meta = open_text(path, _text_settings(number, data))
        needed = meta.vocab_size
    elif path.is_dir():
        meta = read_meta(path, setting)
        needed = meta.vocab_size
        _check_packed(data, meta, f"{setting}={path}")
        train, validation = (open_split(path, meta, split) for split in SPLITS)
        chunks[0] = chunk_checksums(path, meta, "train", train, data.damaged_chunks)
        chunks[1] = chunk_checksums(path, meta, "validation", validation, data.damaged_chunks)
    else:
        needed = BYTES_VOCAB_SIZE
        text = map_file(path, "uint8")
        check_utf8(path, text[:ENCODING_BYTES].tobytes())
        num_train = len(text) - int(len(text) * data.validation_fraction)
        train, validation = text[:num_train], text[num_train:]
    for split, part in zip(SPLITS, (train, validation), strict=True):
        if len(part) < data.seq_len + 1:
            shorter = f"set data.seq_len={len(part) - 1} or less, or " if len(part) > 1 else ""
            larger = " or a larger validation fraction" if split == "validation" else ""
            raise DataError(
                f"{setting}={path}: its {split} part has {len(part)} tokens, fewer than the {data.seq_len + 1} of one "
                f"sequence of data.seq_len={data.seq_len}: {shorter}give more text{larger}"
            )
    return Tokens(train, validation, needed, path, setting, chunks[0], chunks[1], meta)


def _check_packed(data: DataConfig, meta: Meta, folder: str) -> None:
    """Raise DataError if a packed folder is to be read as something else. `folder` is its setting and path."""
    if meta.seq_len is None:
        return
    if not data.mask_documents:
        raise DataError(
            f"{folder} has sequences packed with conversations: set data.mask_documents=true, or make a "
            "folder with scripts/prepare_text.py"
        )
    if data.seq_len != meta.seq_len:
        raise DataError(
            f"{folder} has packed sequences of {meta.seq_len} tokens, and data.seq_len={data.seq_len}: "
            f"set data.seq_len={meta.seq_len}, or make the folder again with --seq-len {data.seq_len}"
        )


def _text_settings(number: int, data: DataConfig) -> IndexSettings:
    """The settings on which the tokens of a text file depend. Raises DataError."""
    file = tokenizer_file(data, number)
    return IndexSettings(
        text_key=data.text_key,
        validation_fraction=data.validation_fraction,
        tokenizer=source_tokenizer(data, number),
        tokenizer_crc32=zlib.crc32(read_bytes(file, MOST_TOKENIZER)) if file else None,
    )
