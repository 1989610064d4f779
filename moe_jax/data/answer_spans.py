"""Where in the text of a conversation the assistant speaks, by the conversation's chat template."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.data.chat_template import ChatTemplate, Message
from moe_jax.errors import DataError

Span = tuple[int, int]  # characters [begin, end)

MARKS = "\ufdd0", "\ufdd1"  # around an answer: code points that Unicode reserves for programs


class Conversation(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[Span]  # what the assistant says, in order


def rendered(template: ChatTemplate, messages: Sequence[Message]) -> Conversation:
    """Return a conversation as text. `template` has MARKS as its `answer_marks`.

    What the assistant says is in the `{% generation %}` blocks of the template. Without such blocks, each turn of the
    assistant is what it adds to the text of all turns before it and to the generation prompt, its end of turn included,
    if the texts of earlier turns are beginnings of the whole text. Raises DataError if not, or if the template fails.
    """
    text = template.render(messages, add_generation_prompt=False)
    if MARKS[0] in text:
        return _without_marks(text)
    answers = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:turn], add_generation_prompt=False)
        until = template.render(messages[: turn + 1], add_generation_prompt=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise DataError(
                f"the chat template renders turn {turn + 1} in another way once others follow, so what the assistant "
                "says is not known: use a template with {% generation %} blocks (--template)"
            )
        # a generation prompt may begin what only some answers have, such as thoughts
        prompted = _common_length(template.render(messages[:turn]), until)
        answers.append((max(len(before), prompted), len(until)))
    return Conversation(text, answers)


def _common_length(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_marks(text: str) -> Conversation:
    parts, answers, length, begin = [], [], 0, 0
    for part in re.split(f"([{''.join(MARKS)}])", text):
        if part == MARKS[0]:
            begin = length
        elif part == MARKS[1]:
            answers.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return Conversation("".join(parts), answers)
