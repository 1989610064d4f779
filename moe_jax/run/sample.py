"""Sampling of text from a trained model, on one device, and the text after a prompt while its tokens arrive."""

import itertools
import unicodedata
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
from moe_jax.run.sampling_mesh import SamplingMesh

_INCOMPLETE = ("\ufffd", "\r")  # the begin of a character, or of a line break


class TextStream:
    """Turns the tokens after a prompt into text, piece by piece, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stops: Sequence[str] = ()):
        """`before` are the tokens of the prompt."""
        self._tokenizer, self._before, self._stops = tokenizer, list(before), [stop for stop in stops if stop]
        self._shown = 0  # characters that `update` has returned
        self.text = ""  # the text so far, without a stop string
        self.is_stopped = False  # whether there was a stop string

    def update(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Return the text that is new, given all tokens so far.

        Characters that a later token may still change are held back, unless these tokens are the last ones.
        """
        self.text = continuation(self._tokenizer, self._before, list(tokens))
        found = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        held = 0 if is_last else self._held_back()
        if found:
            self.text, held = self.text[: min(found)], 0
        end = max(len(self.text) - held, self._shown)
        new, self._shown = self.text[self._shown : end], end
        return new

    def _held_back(self) -> int:
        """Return the number of last characters that are incomplete, or that may begin a stop string."""
        incomplete = len(self.text) - len(self.text.rstrip("".join(_INCOMPLETE)))
        begun = (n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(incomplete, *begun, 0)


def continuation(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text of `tokens` that follow the tokens `before`.

    Decoding `tokens` alone could lose a space, since a tokenizer may remove the space before the first token.
    """
    known, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    return whole[len(list(shared)) :]


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, replaced by U+FFFD.

    A model of bytes can sample such characters. Tabs and line breaks stay.
    """
    text = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def sample_tokens(
    config: Config, params: Any, prompt: NDArray[np.int32], count: int, temperature: float, seed: int
) -> NDArray[np.int32]:
    """Sample `count` tokens that follow a non-empty prompt.

    `params` are on a mesh of this process, in the layout of the config's pipeline stages.
    """
    where = SamplingMesh.of(config)
    decoder = Decoder(where, where.placed(params), Sampling(temperature))
    generation = Generation.of(decoder, [prompt.tolist()], count, seed)
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
