"""Token files: a .txt file whose bytes are tokens, or a folder prepared by scripts/prepare_text.py."""

import codecs
import difflib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import DataConfig
from moe_jax.data.chunk_checksums import CHUNK_BYTES, REMAKE, ChunkChecksums
from moe_jax.errors import DataError
from moe_jax.files.untrusted import MOST_TOKENIZER, check_regular, read_bytes, read_json

# of a prepared folder; a folder that an older version would misread has a new one
FORMAT = 1
PACKED_FORMAT = 2  # sequences of whole documents, whose tokens have marks (data/token_marks.py)
META_FILE = "meta.json"
BPE_FILE = "tokenizer.json"
BYTES_VOCAB_SIZE = 256
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
TokenArray = NDArray[np.unsignedinteger]  # 1-D, a np.memmap

ENCODING_BYTES = 2**12  # at the beginning of a text, from which its encoding is detected
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# which of each four bytes are 0 in mostly ASCII text without a byte order mark
_ZEROS = {".0.0": "utf-16le", "0.0.": "utf-16be", ".000": "utf-32le", "000.": "utf-32be"}
_DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of a folder's `meta.json`, which describes `train.bin` and `validation.bin`."""

    tokenizer: str  # bytes or bpe
    vocab_size: int
    end_of_text: int  # the token after each document
    dtype: str  # of one token, little-endian
    train_tokens: int
    train_crc32: int
    validation_tokens: int
    validation_crc32: int
    sources: list[str]  # files read, in their order
    skipped: list[str] | None = None  # files and folders that were not read, with the reason
    # tokens before each document; None for older folders, whose documents may have been encoded in pieces
    begin_of_text: list[int] | None = None
    tokenizer_crc32: int | None = None  # of tokenizer.json; None if there is none, and for older folders
    chunk_bytes: int | None = None  # size of the chunks of data/chunk_checksums.py; None for older folders
    seq_len: int | None = None  # the only data.seq_len of a packed folder; None: one stream of tokens

    def count(self, split: Split) -> int:
        return self.train_tokens if split == "train" else self.validation_tokens

    def crc32(self, split: Split) -> int:
        return self.train_crc32 if split == "train" else self.validation_crc32


@dataclass(frozen=True, eq=False)
class Tokens:
    """The memory-mapped tokens of one text: two 1-D arrays of unsigned integers below `vocab_size`."""

    train: TokenArray
    validation: TokenArray
    vocab_size: int
    path: Path
    setting: str  # the name of the setting with the path, for messages
    train_chunks: ChunkChecksums | None = None  # verifies tokens when read; None: a .txt file, or verified before
    validation_chunks: ChunkChecksums | None = None
    meta: Meta | None = None  # None for a .txt file

    @property
    def is_packed(self) -> bool:
        """Whether the tokens are sequences of `seq_len + 1` tokens with marks, not one stream."""
        return self.meta is not None and self.meta.seq_len is not None


def open_tokens(data: DataConfig, vocab_size: int) -> tuple[Tokens, ...]:
    """Map the tokens of each source into memory, for a model of `vocab_size` tokens.

    Only folders without checksums of chunks, which older versions made, are read and verified here. Raises DataError if
    tokens are missing, damaged, of a larger vocabulary, or too few for one sequence, or if `data.mask_documents` is set
    for a .txt file.
    """
    paths = zip(data.mixture, data.path_names, strict=True)
    return tuple(_open_source(source.path, setting, data, vocab_size) for source, setting in paths)


def _open_source(path: str | Path, setting: str, data: DataConfig, vocab_size: int) -> Tokens:
    """Map the tokens of one source into memory. Raises DataError."""
    path = find_data(path, setting)
    if data.mask_documents and not path.is_dir():
        raise DataError(
            f"data.mask_documents=true, and {setting}={path} is one document: prepare a folder of documents with "
            "scripts/prepare_text.py, or use data.mask_documents=false"
        )
    chunks: list[ChunkChecksums | None] = [None, None]
    meta = None
    if path.is_dir():
        meta = read_meta(path)
        needed = meta.vocab_size
        _check_packed(data, meta, f"{setting}={path}")
        train, validation = (_open_split(path, meta, split) for split in SPLITS)
        chunks[0] = _chunks(path, meta, "train", train, data.damaged_chunks)
        chunks[1] = _chunks(path, meta, "validation", validation, data.damaged_chunks)
    else:
        needed = BYTES_VOCAB_SIZE
        text = _map(path, "uint8")
        check_utf8(path, text[:ENCODING_BYTES].tobytes())
        num_train = len(text) - int(len(text) * data.validation_fraction)
        train, validation = text[:num_train], text[num_train:]
    if needed > vocab_size:
        raise DataError(
            f"{setting}={path} has a vocabulary of {needed} tokens, more than model.vocab_size={vocab_size}: "
            f"set model.vocab_size={needed}"
        )
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


def check_utf8(file: Path, head: bytes) -> None:
    """Raise DataError if the first ENCODING_BYTES of a text are UTF-16 or UTF-32, or all zero.

    UTF-16 and UTF-32 are detected by their byte order mark or by the positions of zeros.
    """
    if len(head) > 3 and not any(head):
        raise DataError(f"{file} begins with {len(head)} bytes of zero, which are no text: make or copy it again")
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    zeros = [head[i::4].count(0) * 8 > len(head) for i in range(4)]  # whether most bytes 4k + i are 0
    encoding = encoding or _ZEROS.get("".join("0" if zero else "." for zero in zeros))
    if encoding:
        raise DataError(f"{file} is {encoding.upper()}, not UTF-8: convert it with iconv -f {encoding} -t utf-8")


def find_data(path: str | Path, setting: str = "data.path") -> Path:
    """`path`, the value of `setting`, as a Path. Raises DataError if it is not an existing .txt file or folder."""
    path = Path(path)
    if not path.exists():
        siblings = [p.name for p in path.parent.glob("*") if p.is_dir() or p.suffix == ".txt"]
        near = difflib.get_close_matches(path.name, siblings, n=1)
        cure = f"did you mean {path.parent / near[0]}?" if near else "name a .txt file or a prepared folder"
        raise DataError(f"{setting}={path} does not exist: {cure}")
    if not path.is_dir() and path.suffix != ".txt":
        raise DataError(
            f"{setting}={path} is neither a .txt file nor a folder: prepare it with scripts/prepare_text.py"
        )
    return path


def read_meta(folder: Path) -> Meta:
    """Read and check the `meta.json` of a prepared folder. Raises DataError."""
    file = folder / META_FILE
    if not file.exists():
        raise DataError(f"{folder} has no {META_FILE}: make a folder from its text with scripts/prepare_text.py")
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not readable JSON ({error}): {REMAKE}") from None
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no JSON object: {REMAKE}")
    if (found := values.pop("format", None)) not in (FORMAT, PACKED_FORMAT):
        formats = f"{FORMAT} and {PACKED_FORMAT}"
        raise DataError(f"{file} has format={found}, and this version reads format={formats}: {REMAKE}")
    lists: dict[str, Any] = {"sources": list, "skipped": list | None, "begin_of_text": list | None}
    kinds = Meta.__annotations__ | lists
    wrong = [key for key, kind in kinds.items() if not isinstance(values.get(key), kind)]
    if not wrong and values["dtype"] not in _DTYPES:
        wrong = ["dtype"]
    if not wrong and not all(isinstance(token, int) for token in values.get("begin_of_text") or ()):
        wrong = ["begin_of_text"]
    if (values.get("seq_len") is not None) != (found == PACKED_FORMAT):
        wrong.append("seq_len")
    if wrong:
        raise DataError(f"{file} has no usable {', '.join(wrong)}: {REMAKE}")
    return Meta(**{key: values[key] for key in kinds if key in values})


def check_tokenizer_file(folder: Path, meta: Meta) -> None:
    """Raise DataError if the tokenizer.json of a prepared folder is not the one that produced its tokens."""
    file = folder / BPE_FILE
    try:
        found = None if meta.tokenizer_crc32 is None else zlib.crc32(read_bytes(file, MOST_TOKENIZER))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): {REMAKE}") from None
    if found != meta.tokenizer_crc32:
        raise DataError(
            f"{file} is not the tokenizer of these tokens: its crc32 is {found}, and {META_FILE} says "
            f"{meta.tokenizer_crc32}: {REMAKE}"
        )


def verify_tokens(folder: Path) -> Meta:
    """Read all files of a prepared folder, verify sizes and checksums, and return its Meta. Raises DataError."""
    meta = read_meta(folder)
    check_tokenizer_file(folder, meta)
    for split in SPLITS:
        tokens = _open_split(folder, meta, split)
        _verify_file(folder, meta, split, tokens)
        if meta.chunk_bytes:
            ChunkChecksums(folder / f"{split}.bin", tokens).is_intact(0, len(tokens))
    return meta


def _verify_file(folder: Path, meta: Meta, split: Split, tokens: TokenArray) -> None:
    """Raise DataError if the tokens of a split do not match the checksum in meta.json."""
    found = zlib.crc32(tokens.data)
    if found != meta.crc32(split):
        raise DataError(
            f"{folder / split}.bin is damaged: its crc32 is {found}, and {META_FILE} says {meta.crc32(split)}: {REMAKE}"
        )


def _chunks(folder: Path, meta: Meta, split: Split, tokens: TokenArray, allowed: int) -> ChunkChecksums | None:
    """The chunks of a split; None for an older folder, which is read and verified at once. Raises DataError."""
    if meta.chunk_bytes == CHUNK_BYTES:
        return ChunkChecksums(folder / f"{split}.bin", tokens, allowed)
    _verify_file(folder, meta, split, tokens)
    return None


def _open_split(folder: Path, meta: Meta, split: Split) -> TokenArray:
    """Map the token file of a split. Raises DataError if its size is not the one in meta.json."""
    file, count, width = folder / f"{split}.bin", meta.count(split), np.dtype(meta.dtype).itemsize
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): {REMAKE}") from None
    if size != count * width:
        raise DataError(
            f"{file} holds {size} bytes, and {META_FILE} says {count} tokens × {width} bytes = {count * width}: "
            f"{REMAKE}"
        )
    return _map(file, meta.dtype)


def _map(file: Path, dtype: str) -> TokenArray:
    """Map a regular, non-empty file into memory. Raises DataError."""
    try:
        check_regular(file)
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty: give some text")
        return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
