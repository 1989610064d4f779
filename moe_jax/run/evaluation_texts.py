"""The texts that an evaluation names, encoded with the tokenizer of its run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moe_jax.config import Config
from moe_jax.data.evaluation import text_samples
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.data.tokens import BPE_FILE, find_data
from moe_jax.errors import ConfigError
from moe_jax.run.evaluation import Text
from moe_jax.run.model_tokenizer import check_tokens_of_run, tokenizer_of_run

_OPTION = "--data"


def open_texts(names: Sequence[str], config: Config, run: Path) -> list[Text]:
    """Open .txt, .jsonl and .parquet files, of which all text is used, and prepared folders, of which the validation
    part is. Raises UserError.
    """
    texts = [_open_text(name, config, run) for name in names]
    called = [text.name for text in texts]
    for name in called:
        if called.count(name) > 1:
            raise ConfigError(f"{_OPTION} names two texts {name}, which would share one result: evaluate one at a time")
    return texts


def _open_text(given: str, config: Config, run: Path) -> Text:
    path = find_data(given, _OPTION)
    if path.is_dir():
        data = dataclasses.replace(config.data, path=str(path), sources=(), tokenizer="bytes", text_key="text")
        tokenizer = check_tokens_of_run(config, run, data)
        (tokens,) = open_tokens(data, config.model.vocab_size)
        return Text(path.name, Samples.of(tokens, "validation", data), tokenizer)
    tokenizer, known = tokenizer_of_run(config, run), config.model.vocab_size
    if tokenizer.vocab_size > known:
        raise ConfigError(
            f"{_OPTION}={path} is encoded with {tokenizer.vocab_size} tokens, more than model.vocab_size={known}: put "
            f"the model's own {BPE_FILE} into the run's folder"
        )
    return Text(path.name, text_samples(path, config.data, tokenizer, _OPTION), tokenizer)
