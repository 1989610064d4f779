"""Chat templates of Hugging Face models: conversations as text, and where in it the assistant speaks.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, which gives it no files, no modules
and no attributes that begin with an underscore; it can still use time and memory.
"""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.data.tokenizer import optional_package
from moe_jax.errors import DataError
from moe_jax.files.untrusted import read_json, read_text

Message = dict[str, Any]  # at least "role" and "content"
Span = tuple[int, int]  # characters [begin, end)

_TEMPLATE_FILE, _SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
MARKS = "\ufdd0", "\ufdd1"  # of a {% generation %} block: code points that Unicode reserves for programs
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[Span]  # what the assistant says, in order


class ChatTemplate:
    """A chat template. Raises DataError if it is not a Jinja template."""

    def __init__(self, source: str, name: str, special_tokens: dict[str, str]) -> None:
        self._name, self._special_tokens = name, special_tokens
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja's errors have a base class of their own in a package that is imported late
            raise DataError(f"{name} is no chat template ({error}): fetch it again") from None

    def render(self, messages: Sequence[Message], where: str) -> Rendered:
        """Return a conversation as text. `where` names it in messages of errors.

        What the assistant says is in the `{% generation %}` blocks of the template. Without such blocks, each turn of
        the assistant is what it adds to the text of all turns before it, up to its end of turn, if the texts of earlier
        turns are beginnings of the whole text. Raises DataError if not, or if the template raises an error.
        """
        text = self._text(messages, where)
        if MARKS[0] in text:
            return _without_marks(text)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:turn], where, add_generation_prompt=True)
            until = self._text(messages[: turn + 1], where)
            if not (text.startswith(until) and until.startswith(before)):
                raise DataError(
                    f"{where}: {self._name} renders turn {turn + 1} in another way once others follow, so what the "
                    "assistant says is not known: use a template with {% generation %} blocks (--template)"
                )
            spans.append((len(before), len(until)))
        return Rendered(text, spans)

    def _text(self, messages: Sequence[Message], where: str, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self._special_tokens,
                )
            )
        except Exception as error:  # whatever the template's expressions raise
            reason = str(error).partition("\n")[0]
            raise DataError(f"{where}: {self._name} refuses it ({reason}): repair or remove it") from None


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate:
    """Return the chat template of a model's folder, or that in a `file`. Raises DataError."""
    settings = folder / _SETTINGS_FILE
    try:
        found = read_json(settings) if settings.exists() else {}
        names = {name: _content(found.get(name)) for name in _SPECIAL_NAMES}
        special_tokens = {name: content for name, content in names.items() if content is not None}
        own = folder / _TEMPLATE_FILE
        if file is not None or own.exists():
            return ChatTemplate(read_text(file or own), str(file or own), special_tokens)
        source = _default(found.get("chat_template"))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(f"the chat template of {folder} cannot be read ({error}): fetch it again") from None
    if source is None:
        raise DataError(
            f"{folder} has no chat template, neither {_TEMPLATE_FILE} nor in {_SETTINGS_FILE}: name one by --template"
        )
    return ChatTemplate(source, f"the chat template of {settings}", special_tokens)


def _default(template: Any) -> str | None:
    """The template in tokenizer_config.json, which may be a list of named ones."""
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _without_marks(text: str) -> Rendered:
    """Remove the marks of generation blocks from a text."""
    parts, spans, length, begin = [], [], 0, 0
    for part in re.split(f"([{''.join(MARKS)}])", text):
        if part == MARKS[0]:
            begin = length
        elif part == MARKS[1]:
            spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), spans)


def _environment() -> Any:
    """A sandbox with the settings, filters and functions that templates of Hugging Face's transformers expect."""
    jinja2, sandbox = optional_package("jinja2"), optional_package("jinja2.sandbox")
    nodes, ext = optional_package("jinja2.nodes"), optional_package("jinja2.ext")

    class Generation(ext.Extension):
        """The tag {% generation %} … {% endgeneration %}, whose output gets marks."""

        tags = {"generation"}  # noqa: RUF012 – jinja's protocol

        def parse(self, parser: Any) -> list[Any]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in MARKS)
            return [begin, *body, end]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
