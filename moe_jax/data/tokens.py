"""Token files: the folders that scripts/prepare_text.py makes, and .txt files whose bytes are tokens."""

import codecs
import difflib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_jax.config.sections import TEXT_SUFFIXES
from moe_jax.data.chunk_checksums import CHUNK_BYTES, REMAKE, ChunkChecksums
from moe_jax.errors import DataError
from moe_jax.files.local_copy import local_data
from moe_jax.files.untrusted import MOST_TOKENIZER, check_regular, read_bytes, read_json

# of a prepared folder; a folder that an older version would misread has a new one
FORMAT = 1
PACKED_FORMAT = 2  # sequences of whole documents, whose tokens have marks (data/token_marks.py)
META_FILE = "meta.json"
BPE_FILE = "tokenizer.json"
BYTES_VOCAB_SIZE = 256
DATASET_FILES = ("state.json", "dataset_info.json")  # beside the Arrow files of a dataset that was saved to disk
DATASET_DICT = "dataset_dict.json"  # of several splits, each with its folder
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


def is_text(path: str | Path) -> bool:
    """Whether a path names text that is encoded while a run trains: a file, or a dataset that was saved to disk."""
    return is_saved_dataset(Path(path)) or (Path(path).suffix in TEXT_SUFFIXES and not Path(path).is_dir())


def is_saved_dataset(path: Path) -> bool:
    """Whether a path is a folder of `save_to_disk` of Hugging Face's `datasets`, with one split."""
    return all((path / name).is_file() for name in DATASET_FILES) and not (path / META_FILE).exists()


def check_has_one_split(folder: Path, name: str) -> None:
    """Raise DataError if a folder is that of a `DatasetDict`, with a folder for each split; `name` is for messages."""
    file = folder / DATASET_DICT
    if not file.is_file():
        return
    try:
        splits = [str(each) for each in read_json(file)["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}): save the dataset again") from None
    example = f": name one, e.g. {name}/{splits[0]}" if splits else ""
    raise DataError(f"{name} has the splits {', '.join(splits) or 'of no dataset'}{example}")


def find_data(path: str | Path, setting: str = "data.path") -> Path:
    """`path`, the value of `setting`, or the copy of a URL. Raises DataError if no run can train on what it names."""
    path = local_data(path)
    if not path.exists():
        siblings = [p.name for p in path.parent.glob("*") if p.is_dir() or p.suffix in (".txt", *TEXT_SUFFIXES)]
        near = difflib.get_close_matches(path.name, siblings, n=1)
        cure = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder"
        )
        raise DataError(f"{setting}={path} does not exist: {cure}")
    if not path.is_dir() and path.suffix not in (".txt", *TEXT_SUFFIXES):
        raise DataError(
            f"{setting}={path} is no folder, .txt, .jsonl, .parquet or .array_record file: prepare it with "
            "scripts/prepare_text.py"
        )
    check_has_one_split(path, f"{setting}={path}")
    return path


def read_meta(folder: Path, setting: str | None = None) -> Meta:
    """Read and check the `meta.json` of a prepared folder. Raises DataError; `setting` names the folder in it."""
    file = folder / META_FILE
    if not file.exists():
        name = f"{setting}={folder}" if setting else f"{folder}"
        raise DataError(f"{name} has no {META_FILE}: make a folder from its text with scripts/prepare_text.py")
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
        tokens = open_split(folder, meta, split)
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


def chunk_checksums(folder: Path, meta: Meta, split: Split, tokens: TokenArray, allowed: int) -> ChunkChecksums | None:
    """The chunks of a split; None for an older folder, which is read and verified at once. Raises DataError."""
    if meta.chunk_bytes == CHUNK_BYTES:
        return ChunkChecksums(folder / f"{split}.bin", tokens, allowed)
    _verify_file(folder, meta, split, tokens)
    return None


def open_split(folder: Path, meta: Meta, split: Split) -> TokenArray:
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
    return map_file(file, meta.dtype)


def map_file(file: Path, dtype: str) -> TokenArray:
    """Map a regular, non-empty file into memory. Raises DataError."""
    try:
        check_regular(file)
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty: give some text")
        return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
