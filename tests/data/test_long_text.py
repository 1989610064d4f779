"""A long text's tokens are those of encoding it at once, for tokenizers of every kind."""

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moe_jax.data import long_text
from moe_jax.data.tokenizer import BpeTokenizer
from tests.data.tokenizer_kinds import KINDS, LINES, save


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, BpeTokenizer]:
    """As its library has it, and ours."""
    made = KINDS[request.param]()
    folder = save(made, tmp_path_factory.mktemp(request.param))
    made.encode_special_tokens = True
    return made, BpeTokenizer(folder / "tokenizer.json")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "WINDOW", 150)
    monkeypatch.setattr(long_text, "OVERLAP", 120)
    monkeypatch.setattr(long_text, "_WINDOWS_PER_CALL", 3)


def text_of(generator: random.Random, words: int) -> str:
    """Words, numbers, letters that no tokenizer here has learnt, runs of spaces and of lines."""
    known = " ".join(LINES).split()
    rare = ["言葉", "naïve", "</s>", "0123456789" * 3, "a" * 20]
    gaps = [" "] * 9 + ["\n", "\r\n\r\n", "   ", "\n\n \n", "\t"]
    drawn = (generator.choice(known if generator.random() < 0.9 else rare) for _ in range(words))
    return "".join(word + generator.choice(gaps) for word in drawn)


def cut(text: str, generator: random.Random) -> Iterator[str]:
    while text:
        size = generator.randrange(1, 200)
        yield text[:size]
        text = text[size:]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def at_once(made: Tokenizer, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_of_the_whole_text(kind: tuple[Tokenizer, BpeTokenizer], seed: int) -> None:
    made, tokenizer = kind
    generator = random.Random(seed)
    text = text_of(generator, words=600)
    parts = list(tokenizer.encode_long(cut(text, generator)))
    assert joined(parts) == at_once(made, text)
    assert len(parts) > 5, "it was cut"


def test_pieces_encoded_alone_have_other_tokens(kind: tuple[Tokenizer, BpeTokenizer]) -> None:
    """So that the tests above show something."""
    made, tokenizer = kind
    text = text_of(random.Random(0), words=600)
    alone = [token for start in range(0, len(text), 150) for token in tokenizer.encode(text[start : start + 150])]
    assert alone != at_once(made, text)


@pytest.mark.parametrize("run", ["a" * 2000, "12" * 1500, " " * 1000 + "fox", "言" * 700, "fox " * 500, "\n" * 800])
def test_runs_that_nothing_cuts(kind: tuple[Tokenizer, BpeTokenizer], run: str) -> None:
    """Windows that do not agree are encoded together."""
    made, tokenizer = kind
    for text in (run, f"{LINES[0]} {run} {LINES[1]}", f"x{run}{run[:77]} {LINES[2]}"):
        assert joined(tokenizer.encode_long([text])) == at_once(made, text)


def test_a_text_as_long_as_a_window_or_empty(kind: tuple[Tokenizer, BpeTokenizer]) -> None:
    made, tokenizer = kind
    for size in (0, 1, 119, 120, 269, 270, 271, 420, 421):
        text = text_of(random.Random(size), words=200)[:size]
        assert joined(tokenizer.encode_long([text])) == at_once(made, text), size


def test_windows_that_never_agree_are_not_encoded_over_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one grows to twice its length each time."""
    tokenizer = BpeTokenizer(save(KINDS["byte_level"](), tmp_path) / "tokenizer.json")
    encoded = []
    with_starts = tokenizer._encode_with_starts

    def counted(texts: list[str]) -> object:
        encoded.extend(map(len, texts))
        return with_starts(texts)

    monkeypatch.setattr(tokenizer, "_encode_with_starts", counted)
    monkeypatch.setattr(long_text, "_join_position", lambda *_: None)
    text = text_of(random.Random(0), words=3000)
    assert joined(tokenizer.encode_long([text])) == tokenizer.encode(text)
    assert sum(encoded) < 8 * len(text)
