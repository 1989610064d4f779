"""A copy of the tokenizer and the chat template in the run folder, for chats and exports when the original folders may
be gone.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.config import Config
from moe_jax.convert.hf_config import config_in, read_json
from moe_jax.convert.source import ORIGIN, is_imported, origin_of
from moe_jax.convert.write import (
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    copy_companion_files,
    special_tokens,
)
from moe_jax.data.byte_level import byte_level_json
from moe_jax.data.chat_template import FILE as TEMPLATE
from moe_jax.data.sources import source_tokenizer, tokenizer_file
from moe_jax.data.tokenizer import load_model_tokenizer
from moe_jax.data.tokens import is_text, read_meta
from moe_jax.errors import DataError, UserError
from moe_jax.files.atomic import write_atomically, write_together
from moe_jax.files.local_copy import local_outline
from moe_jax.files.object_store import StoreError
from moe_jax.files.untrusted import MOST_TOKENIZER, read_bytes, read_text


def save_tokenizer(config: Config, run: Path) -> None:
    """Copy the tokenizer of the model that a run begins with, or else that of its prepared data, into the run folder.

    The chat template is that of the run's conversations, or else the model's. Raises OSError.
    """
    origin, present = origin_of(config), set[str]()
    if origin is not None:
        write_atomically(run / ORIGIN, read_text(origin))
        copy_companion_files(origin.parent, run)
        present = {name for name in (TOKENIZER, TOKENIZER_CONFIG) if origin.with_name(name).is_file()}
    elif config.train.init_from is not None and (run / ORIGIN).exists():  # saved before; its origin is gone
        present = {name for name in (TOKENIZER, TOKENIZER_CONFIG) if (run / name).is_file()}
    if template := _template_of_data(config):
        write_atomically(run / TEMPLATE, read_text(template))
    own = _tokenizer_of_data(config)
    if TOKENIZER in present or own is None or not own.file.is_file():
        return
    file = own.file
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _name_of(file, own.end_of_text)}
    text = json.dumps({name: value for name, value in (settings | _begin(own)).items() if value is not None}, indent=2)
    found = {TOKENIZER: read_bytes(file, MOST_TOKENIZER), TOKENIZER_CONFIG: f"{text}\n".encode()}
    write_together({run / name: content for name, content in found.items() if name not in present})


def special_tokens_of(config: Config, run: Path) -> dict[str, Any]:
    """Special tokens for the config.json of an export: the imported model's, or else the end of a text in the data.

    Missing ones are null: without an entry, transformers would use the defaults of the model's class. Raises
    ConvertError.
    """
    file = run / ORIGIN if (run / ORIGIN).exists() else origin_of(config)
    if file is not None:
        return special_tokens(config_in(file))
    end: int | None = None
    if own := _tokenizer_of_data(config):
        end = own.end_of_text
    elif (run / TOKENIZER).is_file():
        end = load_model_tokenizer(run)[1].end_of_text
    return {**dict.fromkeys(SPECIAL_TOKENS), "eos_token_id": end}


def byte_tokenizer_of(config: Config, run: Path) -> dict[str, bytes]:
    """The tokenizer.json for an export of a model that was trained on bytes, by its name; empty for other models."""
    if (run / TOKENIZER).is_file() or is_imported(config, run):
        return {}
    path = config.data.mixture[0].path
    if Path(path).suffix == ".txt" and not Path(path).is_dir():
        return {TOKENIZER: byte_level_json()}  # even if the text is gone
    own = _tokenizer_of_data(config)
    return {TOKENIZER: byte_level_json()} if own and not own.file.is_file() else {}


class _DataTokenizer(NamedTuple):
    """The tokenizer of a run's data."""

    file: Path  # its tokenizer.json, which does not exist for bytes
    end_of_text: int
    begin_of_text: list[int]


def _tokenizer_of_data(config: Config) -> _DataTokenizer | None:
    """The tokenizer of the run's first source; None if that is a .txt file or no longer exists."""
    try:
        path = local_outline(config.data.mixture[0].path)
        if is_text(path):
            tokenizer, file = source_tokenizer(config.data), tokenizer_file(config.data)
            return _DataTokenizer(file or path / TOKENIZER, tokenizer.end_of_text, tokenizer.begin_of_text)
        if not path.is_dir():
            return None
        meta = read_meta(path)
        return _DataTokenizer(path / TOKENIZER, meta.end_of_text, meta.begin_of_text or [])
    except (DataError, StoreError):
        return None


def _template_of_data(config: Config) -> Path | None:
    """The chat template of the run's first source that has conversations with one; None without such a source."""
    files = (local_outline(source.path) / TEMPLATE for source in config.data.mixture)
    return next((file for file in files if file.is_file()), None)


def _begin(own: _DataTokenizer) -> dict[str, Any]:
    """Entries of tokenizer_config.json about the token before each text, as in the data."""
    begin = own.begin_of_text
    if len(begin) == 1 and (name := _name_of(own.file, begin[0])):
        return {"bos_token": name, "add_bos_token": True}
    try:
        adds = bool(read_json(own.file).get("post_processor"))
    except (UserError, AttributeError):
        return {}
    return {"add_bos_token": False} if adds and not begin else {}


def _name_of(tokenizer: Path, number: int) -> str | None:
    """The name of a token in a tokenizer.json; None if it is not in the file."""
    try:
        found = read_json(tokenizer)
        vocab = found["model"]["vocab"]  # {name: number}, or a list of [name, score] in the order of numbers
        named = vocab if isinstance(vocab, dict) else {name: each for each, (name, _) in enumerate(vocab)}
        named = named | {each["content"]: each["id"] for each in found["added_tokens"]}
    except (UserError, KeyError, TypeError, ValueError):
        return None
    return next((name for name, own in named.items() if own == number), None)
