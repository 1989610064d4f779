"""Sampling of text from a trained model, on one device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.data.sources import source_tokenizer
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import write_atomically
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.text_stream import continuation, printable


def sample_tokens(
    config: Config, params: Any, prompt: NDArray[np.int32], count: int, temperature: float, seed: int
) -> NDArray[np.int32]:
    """Sample `count` tokens that follow a non-empty prompt.

    `params` are on one device or on a mesh of this process, in the layout of the config's pipeline stages.
    """
    generation = Generation.of(Decoder(config, params, Sampling(temperature)), [prompt.tolist()], count, seed)
    while not generation.is_done:
        generation.advance()
    return np.array(generation.rows[0].new, np.int32)


def sample_text(
    config: Config, params: Any, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, seed: int
) -> str:
    """The prompt and a sampled continuation as text. Raises ConfigError for an invalid prompt."""
    before = encode_prompt(config, tokenizer, prompt)
    tokens = sample_tokens(config, params, before, count, temperature, seed)
    return prompt + printable(continuation(tokenizer, before.tolist(), tokens.tolist()))


def encode_prompt(config: Config, tokenizer: Tokenizer, prompt: str) -> NDArray[np.int32]:
    """The tokens of a prompt, preceded by those that begin a text.

    Raises ConfigError if there are no tokens, or if one is outside the model's vocabulary.
    """
    tokens = [*tokenizer.begin_of_text, *tokenizer.encode(prompt)]
    check_prompt(config, tokens)
    return np.array(tokens, np.int32)


def check_prompt(config: Config, tokens: Sequence[int]) -> None:
    """Raise ConfigError if a prompt has no tokens, or one that is outside the model's vocabulary."""
    known = config.model.vocab_size
    if not tokens:
        raise ConfigError("the prompt is empty: give at least one character, e.g. a line break")
    if max(tokens) >= known:
        raise ConfigError(
            f"the prompt has token {max(tokens)}, and the model knows model.vocab_size={known}: use the tokenizer that "
            "it was trained with"
        )


def write_sample(config: Config, params: Any, run: Path) -> str:
    """Write a sample to the run's sample.txt, at temperature 0.8; returns the text.

    The prompt and the number of tokens are `log.sample_prompt` and `log.sample_tokens`.
    """
    log, tokenizer, seed = config.log, source_tokenizer(config.data), config.train.seed
    text = sample_text(config, params, tokenizer, log.sample_prompt, log.sample_tokens, temperature=0.8, seed=seed)
    write_atomically(run / "sample.txt", text)
    return text
