"""Companion files of a model's weights, which are not converted: tokenizer, chat templates, ids of special tokens.

An import copies these files into the run, a run that starts from a model copies them into its own folder, and an
export copies them from there.
"""

from pathlib import Path
from typing import Any

from moe_jax.convert.hf_config import HfConfig
from moe_jax.files.atomic import write_together

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tiktoken.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_companion_files(source: Path, target: Path) -> None:
    """Copy the companion files that exist, all of them or none. Raises OSError."""
    if source.resolve() == target.resolve():
        return
    found = [file for pattern in _FILES for file in source.glob(pattern) if file.is_file()]
    write_together({target / file.relative_to(source): file.read_bytes() for file in found})


def special_tokens(hf: HfConfig) -> dict[str, Any]:
    """Return the ids of special tokens in a config.json, null included. Raises ConvertError.

    transformers has defaults for missing ones.
    """
    return hf.token_ids(*SPECIAL_TOKENS)
