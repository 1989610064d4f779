"""Tokenizers give back the text they were given, whatever it is."""

import random
import sys
from pathlib import Path

import pytest

from moe_jax.errors import DataError
from moe_jax.train.prepare import prepare_text
from moe_jax.train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

TEXT = "O, what a rogue and peasant slave am I!\nIs it not monstrous that this player here\n" * 40
SURROGATES = range(0xD800, 0xE000)


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(TEXT)
    prepare_text(folder / "text.txt", folder / "tokens", tokenizer="bpe", vocab_size=300)
    return folder / "tokens"


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe_folder: Path) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else load_tokenizer(bpe_folder)


def test_any_unicode_comes_back(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    limits = [0x80, 0x800, 0x10000, 0x110000]  # one to four bytes of UTF-8
    texts = ["", " ", "\r\n\t  \n\n\n a", "<|endoftext|>", "a<|endoftext|>b", "\0", "\ufeff", "e\u0301", "👩‍👩‍👧"]
    for _ in range(300):
        codes = [generator.randrange(generator.choice(limits)) for _ in range(generator.randrange(40))]
        texts.append("".join(chr(code) for code in codes if code not in SURROGATES))
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(tokens) == text
        assert tokens == tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.end_of_text not in tokens


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_the_end_of_a_text_can_be_seen(bpe_folder: Path) -> None:
    bpe = load_tokenizer(bpe_folder)
    assert bpe.decode([*bpe.encode("a"), bpe.end_of_text, *bpe.encode("b")]) == "a<|endoftext|>b"


def test_the_tokenizer_of_a_model_is_used(bpe_folder: Path, tmp_path: Path) -> None:
    """Its documents end with the token that its settings name."""
    model = tmp_path / "model"
    model.mkdir()
    text = (bpe_folder / "tokenizer.json").read_text().replace("<|endoftext|>", "</s>")
    (model / "tokenizer.json").write_text(text)
    (model / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    meta = prepare_text(bpe_folder.parent / "text.txt", tmp_path / "tokens", tokenizer=model)
    found = load_tokenizer(tmp_path / "tokens")
    assert (meta.tokenizer, meta.end_of_text) == ("bpe", found.end_of_text)
    assert found.decode([*found.encode(TEXT), found.end_of_text]) == f"{TEXT}</s>"
    missing = tmp_path / "tokens" / "none"
    with pytest.raises(DataError) as refusal:
        prepare_text(bpe_folder.parent / "text.txt", tmp_path / "other", tokenizer=missing)
    assert str(refusal.value) == f"--tokenizer={missing} must be bytes, bpe, or a folder with a tokenizer.json"


def test_any_tokens_decode(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(100):
        tokens = [generator.randrange(tokenizer.vocab_size + 50) for _ in range(20)]
        assert isinstance(tokenizer.decode(tokens), str)


def test_bytes_that_are_not_utf8_decode_as_replacement() -> None:
    assert ByteTokenizer().decode([0x61, ByteTokenizer.end_of_text, 0xC3, 0x62, 1000]) == "a\ufffd\ufffdb\ufffd"


def test_bpe_needs_fewer_tokens_than_bytes_and_stays_within_its_vocabulary(bpe_folder: Path) -> None:
    bpe = load_tokenizer(bpe_folder)
    assert 257 < bpe.vocab_size <= 300
    assert len(bpe.encode(TEXT)) < len(ByteTokenizer().encode(TEXT)) / 1.5


def test_the_tokenizer_follows_from_the_data_path(tmp_path: Path, bpe_folder: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens")
    assert load_tokenizer(tmp_path / "text.txt").vocab_size == 256
    assert load_tokenizer(tmp_path / "tokens").vocab_size == 256
    assert load_tokenizer(bpe_folder).vocab_size > 256


def test_a_missing_package_names_the_command_that_installs_it(
    bpe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError) as error:
        load_tokenizer(bpe_folder)
    assert str(error.value) == "tokenizers is not installed: pip install -e '.[text]'"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"tokenizer": "bpe"', '"tokenizer": "word"', "{}: unknown tokenizer 'word', expected bytes or bpe"),
        ('"vocab_size": ', '"vocab_size": 9', "{}/tokenizer.json has {vocab} tokens, and meta.json says 9{vocab}"),
    ],
)
def test_a_meta_that_contradicts_the_tokenizer_is_refused(
    bpe_folder: Path, tmp_path: Path, old: str, new: str, expected: str
) -> None:
    meta = (bpe_folder / "meta.json").read_text()
    (tmp_path / "meta.json").write_text(meta.replace(old, new))
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    vocab = load_tokenizer(bpe_folder).vocab_size
    assert str(error.value) == f"{expected.format(tmp_path, vocab=vocab)}: make the folder again"


@pytest.mark.parametrize("content", [None, "", "{}", '{"version": "1.0", "model'])
def test_a_broken_tokenizer_file_is_refused_in_one_line(bpe_folder: Path, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "meta.json").write_bytes((bpe_folder / "meta.json").read_bytes())
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'} is no tokenizer (")
    assert message.endswith("): make the folder again")
    assert "\n" not in message
