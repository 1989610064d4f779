"""Text that a model writes after prompts: streamed, or for many prompts, and the time that it takes.

Prompts come from a file, one a line: text, or JSON with a prompt or the messages of a chat.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.data.chat_template import ChatTemplate, Message
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import DataError
from moe_jax.files.untrusted import parse_json, read_text
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.sample import TextStream, check_prompt, encode_prompt

_JSON_LINES = ".jsonl"
_CURE = 'write {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


class Prompt(NamedTuple):
    """A text to continue, or the messages of a chat; the other one is None."""

    text: str | None
    messages: Sequence[Message] | None = None

    @classmethod
    def question(cls, text: str, system: str | None) -> "Prompt":
        """Return the first message of a chat, after a system message if there is one."""
        first = [] if system is None else [{"role": "system", "content": system}]
        return cls(None, [*first, {"role": "user", "content": text}])

    @property
    def as_json(self) -> dict[str, object]:
        """The prompt as a line of a file has it."""
        return {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}


def read_prompts(file: Path, is_chat: bool, system: str | None) -> list[Prompt]:
    """Return the prompts of a file; empty lines are left out. Raises DataError.

    `is_chat`: a text is the user's question, after the `system` message.
    """
    try:
        lines = {number: line for number, line in enumerate(read_text(file).split("\n"), 1) if line.strip()}
    except OSError as error:
        raise DataError(f"--prompts={file} cannot be read ({error.strerror}): name a file of prompts") from None
    except ValueError:
        raise DataError(f"--prompts={file} is not UTF-8 text: name a file of prompts") from None
    if not lines:
        raise DataError(f"--prompts={file} has no prompts: write one a line")
    if file.suffix != _JSON_LINES:
        return [Prompt.question(line, system) if is_chat else Prompt(line) for line in lines.values()]
    return [_of_json(line, f"line {number} of --prompts={file}", is_chat, system) for number, line in lines.items()]


def _of_json(line: str, where: str, is_chat: bool, system: str | None) -> Prompt:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({str(error)[:80]}): {_CURE}") from None
    text, messages = (found.get(name) if isinstance(found, dict) else None for name in ("prompt", "messages"))
    if isinstance(text, str) and messages is None:
        return Prompt.question(text, system) if is_chat else Prompt(text)
    if text is None and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        if not is_chat:
            raise DataError(f"{where} has messages: add --chat, which applies the model's template")
        return Prompt(None, messages)
    raise DataError(f"{where} is {json.dumps(found)[:80]}: {_CURE}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


@dataclass(frozen=True)
class TextSettings:
    """How text is generated, and where it ends."""

    sampling: Sampling
    count: int  # tokens after each prompt, at most
    seed: int = 0
    ends: frozenset[int] = frozenset()  # tokens that end a text
    stops: tuple[str, ...] = ()  # texts that end a text


class TextGenerator:
    """A model with its tokenizer, and its chat template if it has one.

    The decoder draws by the sampling of the settings.
    """

    def __init__(
        self,
        config: Config,
        decoder: Decoder,
        tokenizer: Tokenizer,
        settings: TextSettings,
        template: ChatTemplate | None = None,
    ):
        self._config, self._tokenizer, self._settings, self._template = config, tokenizer, settings, template
        self._decoder = decoder
        self._begun: list[Generation] = []

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError or DataError for an invalid prompt."""
        self._tokens(prompt)

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yield the text after a prompt piece by piece. Raises ConfigError and DataError for an invalid prompt."""
        generation, texts = self._begin([self._tokens(prompt)], 0)
        while not generation.is_done:
            yield self._advance(generation, texts)[0]

    def continued(self, prompts: Sequence[Prompt], batch_size: int) -> Iterator[dict[str, object]]:
        """Yield each prompt with its text, the number of tokens and the reason for its end.

        Raises ConfigError and DataError for an invalid prompt, before the first one is continued.
        """
        encoded = [self._tokens(prompt) for prompt in prompts]
        for first in range(0, len(prompts), batch_size):
            generation, texts = self._begin(encoded[first : first + batch_size], first)
            while not generation.is_done:
                self._advance(generation, texts)
            for prompt, row, text in zip(prompts[first:], generation.rows, texts, strict=False):
                yield prompt.as_json | {"text": text.text, "tokens": len(row.new), "ended": row.ended}

    def texts_after(self, prompts: Sequence[list[int]], batch_size: int) -> Iterator[str]:
        """Yield the text after each prompt, which is given by its tokens."""
        for first in range(0, len(prompts), batch_size):
            generation, texts = self._begin(prompts[first : first + batch_size], first)
            while not generation.is_done:
                self._advance(generation, texts)
            yield from (text.text for text in texts)

    def speed(self) -> str:
        """Return a line about the time that all texts took, compilation excluded."""
        drawn = sum(len(row.new) for generation in self._begun for row in generation.rows)
        seconds = sum(generation.seconds for generation in self._begun)
        if not self._begun or (first := self._begun[0].first_token_s) is None:
            return "nothing was generated"
        return (
            f"{drawn} tokens in {seconds:.2f} s: {drawn / seconds:.1f} tokens/s, the first after {first:.2f} s; "
            f"compiled in {self._decoder.compile_s:.1f} s"
        )

    def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.messages is None:
            return encode_prompt(self._config, self._tokenizer, prompt.text or "").tolist()
        assert self._template is not None, "messages are for a chat"
        tokens = self._tokenizer.encode_markup(self._template.render(prompt.messages))
        check_prompt(self._config, tokens)
        return tokens

    def _begin(self, prompts: Sequence[list[int]], first: int) -> tuple[Generation, list[TextStream]]:
        settings = self._settings
        generation = Generation.of(self._decoder, prompts, settings.count, settings.seed, first, settings.ends)
        self._begun.append(generation)
        return generation, [TextStream(self._tokenizer, tokens, settings.stops) for tokens in prompts]

    def _advance(self, generation: Generation, texts: Sequence[TextStream]) -> list[str]:
        """Extend the texts that have not ended, and end those with a stop string. Return what is new of each."""
        had_ended = [row.ended is not None for row in generation.rows]
        generation.advance()
        new = []
        for row, text, before in zip(generation.rows, texts, had_ended, strict=True):
            new.append("" if before else text.update(row.new, row.ended is not None))
            if text.is_stopped:
                row.ended = "stop"
        return new
