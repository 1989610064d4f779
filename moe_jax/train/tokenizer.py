"""Text ↔ tokens: UTF-8 bytes, or a byte-level BPE from a prepared folder's tokenizer.json."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_jax.errors import DataError
from moe_jax.foreign_files import check_regular, read_json
from moe_jax.train.tokens import BYTES_VOCAB_SIZE, find_data, read_meta

BPE_FILE = "tokenizer.json"
MIN_BPE_VOCAB_SIZE = BYTES_VOCAB_SIZE + 1  # every byte, and the end of a text

_END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Whatever turns text into tokens below `vocab_size` and back. Text comes back as it was, lone surrogates as ?."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int:
        """The token behind each document, which no text contains."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of any tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    vocab_size = BYTES_VOCAB_SIZE
    end_of_text = 0xFF  # never a byte of UTF-8

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        # a model may have a larger vocabulary: what is no byte decodes like any byte that is not UTF-8
        return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


class BpeTokenizer:
    """A byte-level BPE, or what else a tokenizer.json of Hugging Face's `tokenizers` holds.

    `end_of_text` is the token behind each document, as its number or name; `cure` ends the message of a DataError.
    """

    def __init__(self, file: Path, end_of_text: int | str = _END_OF_TEXT, cure: str = "make the folder again") -> None:
        tokenizers = optional_package("tokenizers")
        try:
            check_regular(file)
            self._bpe = tokenizers.Tokenizer.from_file(str(file))
        except OSError as error:
            raise DataError(f"{file} is no tokenizer ({error.strerror}): {cure}") from None
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{file} is no tokenizer ({error}): {cure}") from None
        self.vocab_size: int = 1 + max(self._bpe.get_vocab().values(), default=-1)  # numbers may have gaps
        self.end_of_text: int = end_of_text if isinstance(end_of_text, int) else self._bpe.token_to_id(end_of_text)
        if self.end_of_text is None:
            raise DataError(f"{file} has no {end_of_text} token: {cure}")
        self._bpe.encode_special_tokens = True  # a text that spells out the end of a text does not end there

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._bpe.encode_batch_fast([_valid(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._bpe.decode(list(tokens), skip_special_tokens=False)


def train_bpe(texts: Iterable[str], vocab_size: int, file: Path) -> BpeTokenizer:
    """Learn a byte-level BPE of at most `vocab_size` tokens from texts, and save it. Raises DataError."""
    tokenizers = optional_package("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(map(_valid, texts), trainer)
    bpe.save(str(file))
    return BpeTokenizer(file)


def of_model(path: Path) -> tuple[Path, BpeTokenizer]:
    """The tokenizer.json in the folder of a Hugging Face model, or this file itself, and its tokenizer.

    tokenizer_config.json beside it names the token behind each document. Raises DataError.
    """
    file = path / BPE_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"--tokenizer={path} must be bytes, bpe, or a folder with a {BPE_FILE}")
    settings = file.with_name("tokenizer_config.json")
    try:
        found = read_json(settings).get("eos_token") if settings.exists() else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{settings} cannot be read ({error}): fetch it again") from None
    name = found.get("content") if isinstance(found, dict) else found
    cure = f"fetch it again, with the {settings.name} that names the end of a text as eos_token"
    return file, BpeTokenizer(file, name if isinstance(name, str) else _END_OF_TEXT, cure)


def load_tokenizer(path: Path, run: Path | None = None) -> Tokenizer:
    """The tokenizer of a data path, a .txt file or a prepared folder; that of a run's model if the path has none.

    Raises DataError.
    """
    path = find_data(path)
    if not path.is_dir():
        return ByteTokenizer() if run is None or not (run / BPE_FILE).exists() else of_model(run)[1]
    meta = read_meta(path)
    if meta.tokenizer == "bytes":
        return ByteTokenizer()
    if meta.tokenizer != "bpe":
        raise DataError(f"{path}: unknown tokenizer {meta.tokenizer!r}, expected bytes or bpe: make the folder again")
    tokenizer = BpeTokenizer(path / BPE_FILE, meta.end_of_text)
    if tokenizer.vocab_size != meta.vocab_size:
        raise DataError(
            f"{path / BPE_FILE} has {tokenizer.vocab_size} tokens, and meta.json says {meta.vocab_size}: "
            "make the folder again"
        )
    return tokenizer


def _valid(text: str) -> str:
    return text.encode(errors="replace").decode()  # a lone surrogate has no UTF-8


def optional_package(module: str) -> Any:
    """Import a module of the `text` extra. Raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(f"{module.partition('.')[0]} is not installed: pip install 'moe_jax[text]'") from None
