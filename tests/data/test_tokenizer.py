"""Tokenizers give back the text they were given, whatever it is."""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_jax.data.prepare import prepare_text
from moe_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_model_tokenizer, load_tokenizer, same_tokens
from moe_jax.data.tokens import verify_tokens
from moe_jax.errors import DataError
from tests.data.tokenizer_kinds import KINDS, save

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


def test_the_same_tokenizer_may_be_written_down_in_other_ways(tmp_path: Path) -> None:
    """Truncation, padding, decoder and special tokens change no token of a text; merges and normalizers do."""
    made = KINDS["llama"]()
    file = save(made, tmp_path / "model") / "tokenizer.json"

    def changed(name: str, **parts: Any) -> Path:
        values = json.loads(file.read_text()) | parts
        other = tmp_path / f"{name}.json"
        other.write_text(json.dumps(dict(reversed(values.items())), indent=3))
        return other

    values = json.loads(file.read_text())
    merges = [" ".join(pair) for pair in values["model"]["merges"]]  # as older versions of the library wrote them
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    same = [
        changed("order"),
        changed("merges", model=values["model"] | {"merges": merges}),
        changed("dropout", model=values["model"] | {"dropout": 0.1}),
        changed("special", added_tokens=[*values["added_tokens"], {"id": 500, "content": "<|im_end|>"} | special]),
        changed("processor", post_processor=None, decoder=None),
        changed(
            "truncation", truncation={"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
        ),
    ]
    assert [other.name for other in same if not same_tokens(file, other)] == []
    text = [{"id": 500, "content": "rogue"} | special | {"special": False}]
    others = [
        changed("normalizer", normalizer=None),
        changed("fewer", model=values["model"] | {"merges": merges[:-1]}),
        changed("added", added_tokens=[*values["added_tokens"], *text]),
        save(KINDS["metaspace_always"](), tmp_path / "other") / "tokenizer.json",
    ]
    assert [other.name for other in others if same_tokens(file, other)] == []


@pytest.mark.parametrize(
    ("kind", "settings", "begin", "end"),
    [
        ("llama", {"eos_token": "</s>"}, ["<s>"], "</s>"),
        ("llama", {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False}, [], "</s>"),
        ("roberta", {"eos_token": {"content": "</s>"}}, ["<s>"], "</s>"),  # and one </s>, not two
        ("byte_level", {}, [], "<|endoftext|>"),
        ("byte_level", {"bos_token": {"content": "<s>"}, "add_bos_token": True}, ["<s>"], "<|endoftext|>"),
    ],
)
def test_tokens_around_a_text_are_those_that_the_model_has(
    kind: str, settings: dict[str, Any], begin: list[str], end: str, tmp_path: Path
) -> None:
    made = KINDS[kind]()
    model = save(made, tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=model)
    for found in (
        load_model_tokenizer(model)[1],
        load_tokenizer(tmp_path / "tokens"),
        load_model_tokenizer(tmp_path / "tokens")[1],
    ):
        assert found.begin_of_text == [made.token_to_id(token) for token in begin]
        assert found.end_of_text == made.token_to_id(end)
        assert found.encode(TEXT) == made.encode(TEXT, add_special_tokens=False).ids


def test_a_tokenizer_without_an_end_of_text_prepares_nothing_and_still_samples(tmp_path: Path) -> None:
    model = save(KINDS["llama"](), tmp_path / "model")
    (model / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert load_model_tokenizer(model)[1].encode("a rogue")
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=model)
    assert str(error.value) == (
        f"{model}/tokenizer.json has no <end> token: fetch it again, with the tokenizer_config.json that names the end "
        "of a text as eos_token"
    )


def test_a_folder_of_an_older_version_has_nothing_before_its_documents(tmp_path: Path) -> None:
    """Whatever its tokenizer would put there now."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = save(KINDS["llama"](), tmp_path / "model")
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=model)
    assert load_tokenizer(tmp_path / "tokens").begin_of_text
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    del meta["begin_of_text"]
    (tmp_path / "tokens" / "meta.json").write_text(json.dumps(meta))
    assert load_tokenizer(tmp_path / "tokens").begin_of_text == []
    meta["begin_of_text"] = ["<s>"]
    (tmp_path / "tokens" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"meta.json has no usable begin_of_text: make the folder again"):
        load_tokenizer(tmp_path / "tokens")


def test_a_folder_whose_tokenizer_was_replaced_is_refused(bpe_folder: Path, tmp_path: Path) -> None:
    """By one that makes as many tokens."""
    folder = tmp_path / "tokens"
    shutil.copytree(bpe_folder, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"a": ', '"a ": ').replace('"b": ', '"a": '))
    for read in (load_tokenizer, load_model_tokenizer, verify_tokens):
        with pytest.raises(
            DataError, match=r"tokenizer.json is not the tokenizer of these tokens: its crc32 is \d+, and"
        ):
            read(folder)


@pytest.mark.parametrize(
    ("kind", "warns"),
    [
        ("unigram", "warning: 2 of {count} tokens are <unk>, for what the tokenizer does not know\n"),
        ("metaspace_first", "warning: 2 of {count} tokens are <unk>, for what the tokenizer does not know\n"),
        *(("llama", ""), ("byte_level", "")),
    ],
)
def test_characters_that_a_tokenizer_does_not_know_are_counted(
    kind: str, warns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the fox \u8a00 and \u8a00 the dog, " + "the quick brown fox " * 9)
    meta = prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=save(KINDS[kind](), tmp_path / "model"))
    assert capsys.readouterr().out == warns.format(count=meta.train_tokens + meta.validation_tokens)


def test_a_tokenizer_that_leaves_out_characters_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = KINDS["metaspace_first"]()
    made.model.unk_token = None
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=save(made, tmp_path / "model"))
    assert capsys.readouterr().out == "warning: the tokenizer leaves out characters that it does not know\n"
