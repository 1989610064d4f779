"""Tokenizers, between text and tokens: UTF-8 bytes, or a tokenizer.json of a model or of a prepared folder."""

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_jax.data.long_text import Encoded, encode_long
from moe_jax.data.tokens import BPE_FILE, BYTES_VOCAB_SIZE, META_FILE, check_tokenizer_file, find_data, read_meta
from moe_jax.errors import DataError
from moe_jax.files.untrusted import MOST_TOKENIZER, check_regular, read_bytes, read_json

# characters that are encoded in one call; a longer document is encoded in windows (data/long_text.py)
BATCH = 2**20
MIN_BPE_VOCAB_SIZE = BYTES_VOCAB_SIZE + 1  # one token for each byte, and one for the end of a text

Document = tuple[str, bool]  # a text, and whether it has its end, and so the token after it

_END_OF_TEXT = "<|endoftext|>"
_RARE = ("\U00012000", "\U00012001")  # cuneiform letters, which few vocabularies contain


class Tokenizer(Protocol):
    """Encodes text as tokens below `vocab_size`, and decodes them.

    Decoding restores the text exactly, except that lone surrogates become question marks.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin_of_text(self) -> list[int]:
        """The tokens before each document and prompt, usually none. `encode` does not add them."""

    @property
    def end_of_text(self) -> int:
        """The token after each document, which no text contains. Raises DataError if there is none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_long(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of the concatenated pieces part by part, the same as from `encode`."""

    def encode_markup(self, text: str) -> list[int]:
        """The tokens of a text in which the names of special tokens stand for these tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Has one token for each byte of UTF-8 text."""

    vocab_size = BYTES_VOCAB_SIZE
    begin_of_text: list[int] = []  # noqa: RUF012 – the protocol's
    end_of_text = 0xFF  # no UTF-8 text contains this byte

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def encode_markup(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_long(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        return map(self.encode, pieces)

    def decode(self, tokens: Sequence[int]) -> str:
        # a model may have a larger vocabulary: a token above 0xFF is decoded like a byte that is not UTF-8
        return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


class BpeTokenizer:
    """A byte-level BPE, or any other model in a tokenizer.json of Hugging Face's `tokenizers`.

    The tokens of a text depend only on the text: truncation, padding and dropout in the file are ignored, and `encode`
    adds no tokens around the text. `end_of_text` is the token after each document, as a number or name. `begin_of_text`
    are the tokens before it, by default those that the file's post-processor adds there. `cure` is the end of the
    message of a DataError.
    """

    def __init__(
        self,
        file: Path,
        end_of_text: int | str = _END_OF_TEXT,
        begin_of_text: Sequence[int] | None = None,
        cure: str = "make the folder again",
    ) -> None:
        self._bpe = _open(file, cure)
        self.vocab_size: int = 1 + max(self._bpe.get_vocab().values(), default=-1)  # token numbers may have gaps
        self._missing = f"{file} has no {end_of_text} token: {cure}"
        number = end_of_text if isinstance(end_of_text, int) else self._bpe.token_to_id(end_of_text)
        self._end_of_text: int | None = number
        self.begin_of_text = self._added_before() if begin_of_text is None else list(begin_of_text)
        self._bpe.encode_special_tokens = True  # a text may spell out "<|endoftext|>" without getting that token

    @property
    def end_of_text(self) -> int:
        if self._end_of_text is None:
            raise DataError(self._missing)
        return self._end_of_text

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_markup(self, text: str) -> list[int]:
        self._bpe.encode_special_tokens = False
        try:
            found: list[int] = self._bpe.encode(_without_surrogates(text), add_special_tokens=False).ids
        finally:
            self._bpe.encode_special_tokens = True
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._bpe.encode_batch_fast([_without_surrogates(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_long(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        return encode_long(map(_without_surrogates, pieces), self._encode_with_starts)

    def encode_with_spans(self, text: str, special_tokens: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of a text [T], and the characters at which each begins and ends [T, 2].

        With `special_tokens`, those that the text spells out are themselves, as in a rendered chat template.
        """
        self._bpe.encode_special_tokens = not special_tokens
        try:
            found = self._bpe.encode(_without_surrogates(text), add_special_tokens=False)
        finally:
            self._bpe.encode_special_tokens = True
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2)

    def special_token_in(self, text: str) -> str | None:
        """The name of a special token that a text spells out; None if there is none."""
        return next((name for name in self._special_names if name in text), None)

    @cached_property
    def _special_names(self) -> list[str]:
        return [token.content for token in self._bpe.get_added_tokens_decoder().values() if token.special]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._bpe.decode(list(tokens), skip_special_tokens=False)

    @cached_property
    def bytes_of_tokens(self) -> NDArray[np.int64] | None:
        """The bytes of each token's text, if the tokens are pieces of UTF-8; else None."""
        decoder = json.loads(self._bpe.to_str())["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            return None
        sizes = np.zeros(self.vocab_size, np.int64)
        for piece, token in self._bpe.get_vocab().items():
            sizes[token] = len(piece)  # a letter for each byte
        for token, added in self._bpe.get_added_tokens_decoder().items():
            sizes[token] = len(added.content.encode())
        return sizes

    def unknown(self) -> int | None:
        """The token of characters that the tokenizer does not know; -1 if it omits them, None if it knows all."""
        none, one, other = self.encode_batch(["a ", *(f"a {letter}" for letter in _RARE)])
        if one != other:
            return None
        return one[-1] if one != none else -1

    def name_of(self, token: int) -> str:
        """The name of a token in the file."""
        return str(self._bpe.id_to_token(token))

    def number_of(self, name: str) -> int | None:
        """The token with this name; None if there is none."""
        return self._bpe.token_to_id(name)

    def _encode_with_starts(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of texts without lone surrogates, with the character at which each token begins."""
        encoded = []
        for each in self._bpe.encode_batch(list(texts), add_special_tokens=False):
            starts = np.fromiter((start for start, _ in each.offsets), np.int64, len(each.ids))
            encoded.append(Encoded(np.asarray(each.ids, np.int64), np.maximum.accumulate(starts)))
        return encoded

    def _added_before(self) -> list[int]:
        """The tokens that the file's post-processor adds before a text."""
        encoding = self._bpe.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]


def _open(file: Path, cure: str) -> Any:
    """Load a tokenizer file, without the settings that make tokens depend on more than the text. Raises DataError."""
    tokenizers = optional_package("tokenizers")
    try:
        check_regular(file)
        found = tokenizers.Tokenizer.from_file(str(file))
    except OSError as error:
        raise DataError(f"{file} is no tokenizer ({error.strerror}): {cure}") from None
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is no tokenizer ({error}): {cure}") from None
    found.no_truncation()
    found.no_padding()
    for chance in ("dropout", "alpha", "nbest_size"):
        if getattr(found.model, chance, None) is not None:
            setattr(found.model, chance, None)
    return found


def same_tokens(one: Path, other: Path) -> bool:
    """Whether two tokenizer files produce the same tokens for the same text, whatever their formatting.

    Truncation, padding, decoders and special tokens, which no text contains, may differ. Raises DataError.
    """
    if read_bytes(one, MOST_TOKENIZER) == read_bytes(other, MOST_TOKENIZER):
        return True
    return _encoding_parts(one) == _encoding_parts(other)


def _encoding_parts(file: Path) -> dict[str, Any]:
    """The parts of a tokenizer file that affect the tokens of a text."""
    found = json.loads(_open(file, "fetch it again").to_str())
    found["added_tokens"] = [token for token in found["added_tokens"] if not token["special"]]
    return {part: found[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def train_bpe(texts: Iterable[str], vocab_size: int, file: Path) -> BpeTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens on texts, and save it as `file`. Raises DataError."""
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
    bpe.train_from_iterator(map(_without_surrogates, texts), trainer)
    bpe.save(str(file))
    return BpeTokenizer(file)


def model_tokenizer_file(path: Path, option: str = "--tokenizer") -> Path:
    """The tokenizer.json at a path, which is this file or its folder. `option` names the path in messages.

    Raises DataError.
    """
    file = path / BPE_FILE if path.is_dir() else path
    if not file.is_file():
        others = "bytes, bpe, or" if option == "--tokenizer" else "bytes or"
        raise DataError(f"{option}={path} must be {others} a folder with a {BPE_FILE}")
    if file.stat().st_size > MOST_TOKENIZER:
        raise DataError(f"{file} has more than {MOST_TOKENIZER:,} bytes: use another tokenizer")
    return file


def load_model_tokenizer(path: Path) -> tuple[Path, BpeTokenizer]:
    """The path of a tokenizer.json, and its tokenizer. `path` is this file, or a folder of a model or prepared data.

    The tokens around each document come from tokenizer_config.json (Hugging Face) or meta.json (prepared data) in the
    same folder. Raises DataError.
    """
    file = model_tokenizer_file(path)
    if file.with_name(META_FILE).exists():
        meta = read_meta(file.parent)
        check_tokenizer_file(file.parent, meta)
        return file, BpeTokenizer(file, meta.end_of_text, meta.begin_of_text)
    settings = file.with_name("tokenizer_config.json")
    try:
        found = read_json(settings) if settings.exists() else {}
        begin, end = (name_of_token(found.get(key)) for key in ("bos_token", "eos_token"))
        adds = found.get("add_bos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{settings} cannot be read ({error}): fetch it again") from None
    cure = f"fetch it again, with the {settings.name} that names the end of a text as eos_token"
    tokenizer = BpeTokenizer(file, end or _END_OF_TEXT, cure=cure)
    number = tokenizer.number_of(begin) if begin else None
    if adds is False:  # overrides the file's post-processor
        tokenizer.begin_of_text = []
    elif adds is True and number is not None:
        tokenizer.begin_of_text = [number]
    return file, tokenizer


def name_of_token(token: Any) -> str | None:
    """The name of a token, which tokenizer_config.json may write as an object; None if it has no name."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a data path, which is a .txt file or a prepared folder. Raises DataError."""
    path = find_data(path)
    if not path.is_dir():
        return ByteTokenizer()
    meta = read_meta(path)
    if meta.tokenizer == "bytes":
        return ByteTokenizer()
    if meta.tokenizer != "bpe":
        raise DataError(f"{path}: unknown tokenizer {meta.tokenizer!r}, expected bytes or bpe: make the folder again")
    tokenizer = BpeTokenizer(path / BPE_FILE, meta.end_of_text, meta.begin_of_text or ())
    if tokenizer.vocab_size != meta.vocab_size:
        raise DataError(
            f"{path / BPE_FILE} has {tokenizer.vocab_size} tokens, and meta.json says {meta.vocab_size}: "
            "make the folder again"
        )
    check_tokenizer_file(path, meta)
    return tokenizer


def _without_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()


def optional_package(module: str) -> Any:
    """Import a module of the `text` extra. Raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(f"{module.partition('.')[0]} is not installed: pip install -e '.[text]'") from None


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each document, with those that begin and end a text."""
    short = [text for text, _ in documents if len(text) <= BATCH]
    encoded = iter(tokenizer.encode_batch(short))
    found = []
    for text, ends in documents:
        tokens = next(encoded) if len(text) <= BATCH else [id for part in tokenizer.encode_long([text]) for id in part]
        found.append([*tokenizer.begin_of_text, *tokens, *([tokenizer.end_of_text] if ends else ())])
    return found
