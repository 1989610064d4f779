"""The tokenizer of bytes as a tokenizer.json, for the folder of an exported model.

It has one token for each byte, numbered as the byte, and merges none. Its names of bytes are those of all byte-level
BPEs: visible characters of Latin-1 stand for themselves, other bytes for the characters from U+0100 on, in order.
"""

import json
from pathlib import Path
from typing import Any

from moe_jax.data.tokens import BYTES_VOCAB_SIZE
from moe_jax.files.untrusted import read_json

_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_FIRST_OTHER = 0x100  # the character of the first byte that is not visible


def byte_level_json() -> bytes:
    """Return the content of the tokenizer.json. It names no end of a text, which a text could then spell out."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    found: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": _vocab(), "merges": []},
    }
    return (json.dumps(found, ensure_ascii=False, indent=1) + "\n").encode()


def is_byte_level(file: Path) -> bool:
    """Whether a tokenizer.json makes of each text its UTF-8 bytes. One that cannot be read does not."""
    try:
        found: dict[str, Any] = read_json(file)
        model, level = found["model"], found["pre_tokenizer"]
        return bool(
            model["vocab"] == _vocab()
            and not (model["merges"] or found["normalizer"] or found.get("added_tokens"))
            and level["type"] == "ByteLevel"
            and not level["add_prefix_space"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _vocab() -> dict[str, int]:
    others = [byte for byte in range(BYTES_VOCAB_SIZE) if byte not in _VISIBLE]
    names = {byte: chr(_FIRST_OTHER + number) for number, byte in enumerate(others)}
    return {names.get(byte, chr(byte)): byte for byte in range(BYTES_VOCAB_SIZE)}
