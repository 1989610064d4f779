"""Text that arrives token by token: no character, line break or stop string is shown in part."""

import io
import sys

import pytest

from moe_jax.cli import generate
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.errors import DataError
from moe_jax.run.sample import TextStream

BYTES = ByteTokenizer()


def pieces(text: str, stops: tuple[str, ...] = (), step: int = 1) -> tuple[list[str], TextStream]:
    """What is new after every `step` tokens, until a stop string."""
    tokens, stream, found = BYTES.encode(text), TextStream(BYTES, BYTES.encode("é"), stops), []
    for end in range(step, len(tokens) + step, step):
        found.append(stream.update(tokens[:end], end >= len(tokens)))
        if stream.is_stopped:
            break
    return found, stream


def test_incomplete_characters_are_held_back():
    found, stream = pieces("aé\r\n…b")
    assert found == ["a", "", "é", "", "\r\n", "", "", "…", "b"]
    assert stream.text == "aé\r\n…b"


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    stream = TextStream(BYTES, [], ())
    assert stream.update([0x61, 0xC3]) == "a"
    assert stream.update([0x61, 0xC3], is_last=True) == "\ufffd"


@pytest.mark.parametrize("step", [1, 2, 5, 20])
def test_a_stop_string_ends_the_text_and_is_never_shown(step):
    found, stream = pieces("one\nUser: two", ("\nUser:", "zzz"), step)
    assert "".join(found) == stream.text == "one"
    assert stream.is_stopped


def test_the_begin_of_a_stop_string_is_shown_once_it_is_none():
    found, stream = pieces("a<|ab<|b", ("<|end|>",))
    assert found == ["a", "", "", "<|a", "b", "", "", "<|b"]
    assert not stream.is_stopped
    assert "".join(pieces("a<|", ("<|end|>",))[0]) == "a<|", "what is left at the end is no stop string"


def test_the_first_of_several_stop_strings_counts():
    assert pieces("a1b2c", ("2", "1"), 20)[1].text == "a"


def test_questions_that_are_no_text_end_a_chat_with_one_line(monkeypatch):
    """Those before are answered."""
    asked = []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n" * 5000 + b"caf\xe9\n"), encoding="utf-8"))
    monkeypatch.setattr(generate, "_print_stream", lambda generator, prompt: asked.append(prompt) or "an answer")
    with pytest.raises(DataError) as refusal:
        generate._converse(None, None)
    assert str(refusal.value) == "standard input is not utf-8 text: convert it, e.g. with iconv"
    assert asked
