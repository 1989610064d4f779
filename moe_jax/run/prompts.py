"""Prompts in a file, one a line: text, or JSON with a prompt or the messages of a chat."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe_jax.data.chat_template import Message
from moe_jax.errors import DataError
from moe_jax.files.untrusted import parse_json, read_text

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
