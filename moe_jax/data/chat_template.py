"""Chat templates: the text with special tokens that a model was trained to read as a conversation.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, with the names and functions that
transformers gives it. It also finds where in the text the assistant speaks.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.data.tokenizer import name_of_token, optional_package
from moe_jax.errors import DataError
from moe_jax.files.untrusted import read_json, read_text

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
Message = Mapping[str, Any]  # role and content
Marks = tuple[str, str]


class ChatTemplate:
    """The chat template in the folder of a model or run, or in a `file`.

    With `answer_marks`, the two marks surround what `{% generation %}` blocks print.
    """

    def __init__(
        self,
        folder: Path,
        file: Path | None = None,
        answer_marks: Marks | None = None,
        cure: str = "put the model's there, or leave out --chat",
    ):
        """Raise DataError if there is no template, ending with `cure`, or an invalid one."""
        settings = _settings(folder)
        self._where, self.source = _source(folder, settings, cure) if file is None else (file, _read(file))
        self._names = {name: name_of_token(settings.get(name)) or "" for name in _TOKENS}
        jinja2 = optional_package("jinja2")
        sandbox = optional_package("jinja2.sandbox")
        self._error: type[Exception] = jinja2.TemplateError
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_tag(answer_marks or ("", ""))],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": self._refuse, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(self.source)
        except self._error as error:
            raise self._invalid(error) from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, up to where the model's answer begins. Raises DataError.

        Without `add_generation_prompt`, it ends with the last message.
        """
        values = {"messages": list(messages), "tools": None, "documents": None}
        try:
            return str(self._template.render(**values, add_generation_prompt=add_generation_prompt, **self._names))
        except (self._error, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise self._invalid(error) from None

    def _refuse(self, message: str) -> None:
        reason = str(message)[:200]
        raise DataError(f"{self._where} refuses this conversation ({reason}): change --system or the messages")

    def _invalid(self, error: Exception) -> DataError:
        return DataError(f"{self._where} fails ({str(error)[:200]}): fetch it again")


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / SETTINGS
    try:
        found = read_json(file) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): fetch it again") from None
    return found if isinstance(found, dict) else {}


def _source(folder: Path, settings: Mapping[str, Any], cure: str) -> tuple[Path, str]:
    """Return the file that has the template, and the template."""
    file = folder / FILE
    if file.exists():
        return file, _read(file)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, of which one is called default
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise DataError(f"{folder} has no {FILE}, and no chat_template in a {SETTINGS}: {cure}")
    return folder / SETTINGS, found


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): fetch it again") from None


def _to_json(value: object, ensure_ascii: bool = False, **settings: Any) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _generation_tag(marks: Marks) -> type:
    """Return the extension for `{% generation %}`, which marks answers for training."""
    extension, nodes = optional_package("jinja2.ext").Extension, optional_package("jinja2.nodes")

    class Generation(extension):  # type: ignore[misc]
        tags = {"generation"}  # noqa: RUF012 – the interface of Jinja

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in marks)
            return nodes.Scope([begin, *body, end], lineno=line)

    return Generation


CharSpan = tuple[int, int]  # characters [begin, end)

MARKS = "\ufdd0", "\ufdd1"  # around an answer: code points that Unicode reserves for programs


class Conversation(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[CharSpan]  # what the assistant says, in order


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
