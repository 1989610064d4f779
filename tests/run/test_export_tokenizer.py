"""Tokenizers, templates and special tokens: an export has those of the imported model, or of the data of its run."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers

from moe_jax.cli import convert
from moe_jax.config import Config, DataConfig, TrainConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.convert.hf_config import ConvertError
from moe_jax.convert.source import ORIGIN, is_imported
from moe_jax.data.byte_level import is_byte_level
from moe_jax.data.prepare import prepare_text
from moe_jax.data.sources import source_tokenizer
from moe_jax.data.tokenizer import ByteTokenizer, load_model_tokenizer
from moe_jax.data.tokens import read_meta
from moe_jax.errors import ConfigError, DataError
from moe_jax.run import export_tokenizer
from moe_jax.run.export_tokenizer import byte_tokenizer_of, save_tokenizer, special_tokens_of
from moe_jax.run.model_tokenizer import check_tokens, tokenizer_of_run
from tests.convert.golden import changed
from tests.data.tokenizer_kinds import KINDS, save

TEXT = "the quick brown fox jumps over the lazy dog " * 60
NUMBERS = {"bos_token_id": 41, "eos_token_id": [42, 43], "pad_token_id": None}
WITH_IT = {
    "tokenizer.json": '{"added_tokens": []}',
    "tokenizer_config.json": '{"eos_token": "</s>", "chat_template": "{{ messages }}"}',
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "generation_config.json": '{"eos_token_id": [42, 43]}',
    "added_tokens.json": "{}",
    "merges.txt": "",
    "vocab.json": "{}",
    "tokenizer.model": "proto",
}


def model_with_all(folder: Path) -> Path:
    model = changed("qwen3_moe", folder, **NUMBERS)
    for name, text in WITH_IT.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    (model / "notes.md").write_text("not copied")
    return model


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    convert.main()


def test_what_came_with_a_model_leaves_with_it(tmp_path, monkeypatch):
    """Through an import, a run that begins with it, and an export, when the model's folder is gone."""
    model, run, tuned = model_with_all(tmp_path / "hf"), tmp_path / "run", tmp_path / "tuned"
    call(monkeypatch, "import", model, "--out", run)
    shutil.rmtree(model)
    assert {name: (run / name).read_text() for name in WITH_IT} == WITH_IT
    shutil.copytree(run / "checkpoints", tuned / "checkpoints")
    text = (run / "config.yaml").read_text()
    (tuned / "config.yaml").write_text(text)
    save_tokenizer(Config(train=TrainConfig(init_from=str(run))), tuned)
    call(monkeypatch, "export", tuned, "--out", tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in WITH_IT} == WITH_IT
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: settings[name] for name in NUMBERS} == NUMBERS
    assert not (tmp_path / "out" / "notes.md").exists()


def test_an_import_is_known_as_one_wherever_it_is(tmp_path, monkeypatch):
    """Also after it was moved, and from another folder than that of the command; not after it was trained."""
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "import", model_with_all(tmp_path / "hf"), "--out", "run")
    moved = Path("run").rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    assert is_imported(load_config(moved), moved)
    (moved / "metrics.jsonl").touch()
    assert not is_imported(load_config(moved), moved)


def test_what_a_models_file_does_not_give_is_left_to_its_class(tmp_path):
    (tmp_path / ORIGIN).write_text('{"model_type": "llama", "eos_token_id": 5}')
    assert special_tokens_of(Config(), tmp_path) == {"eos_token_id": 5}


def test_a_run_chats_in_the_format_of_its_conversations(tmp_path):
    """Whether or not its model has a template, and in the exports of the run."""
    model, run, tokens = model_with_all(tmp_path / "hf"), tmp_path / "run", tmp_path / "tokens"
    run.mkdir()
    tokens.mkdir()
    (tokens / "chat_template.jinja").write_text("taught")
    for init_from in (str(model), None):
        config = Config(data=DataConfig(path=str(tokens)), train=TrainConfig(init_from=init_from))
        save_tokenizer(config, run)
        assert (run / "chat_template.jinja").read_text() == "taught"
        (run / "chat_template.jinja").unlink()


def test_the_template_of_conversations_in_a_bucket_is_that_of_its_copy(tmp_path, monkeypatch):
    run, tokens, url = tmp_path / "run", tmp_path / "tokens", "gs://bucket/tokens"
    run.mkdir()
    tokens.mkdir()
    (tokens / "chat_template.jinja").write_text("taught")
    monkeypatch.setattr(export_tokenizer, "local_outline", {url: tokens}.__getitem__)
    save_tokenizer(Config(data=DataConfig(path=url)), run)
    assert (run / "chat_template.jinja").read_text() == "taught"


@pytest.mark.parametrize("value", ["</s>", 2.0, True, [1, "2"], {"a": 1}])
def test_special_tokens_that_are_no_numbers_are_refused(value, tmp_path, monkeypatch):
    """Before anything is written."""
    model = changed("qwen3_moe", tmp_path, eos_token_id=value)
    with pytest.raises(ConvertError) as refusal:
        call(monkeypatch, "import", model, "--out", tmp_path / "run")
    assert str(refusal.value) == (
        f"{model}/config.json: eos_token_id={json.dumps(value)} must be a whole number, a list of them or null"
    )
    assert not (tmp_path / "run").exists()


@pytest.fixture
def prepared(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer="bpe", vocab_size=270)
    return tmp_path / "tokens"


def test_a_run_from_scratch_has_the_tokenizer_of_its_data(prepared, tmp_path):
    """Also when the data is gone."""
    run, end = tmp_path / "run", json.loads((prepared / "meta.json").read_text())["end_of_text"]
    run.mkdir()
    config = Config(data=DataConfig(path=str(prepared)))
    save_tokenizer(config, run)
    assert (run / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    settings = json.loads((run / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    expected = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    assert special_tokens_of(config, run) == expected
    assert load_model_tokenizer(run)[1].end_of_text == end
    shutil.rmtree(prepared)
    assert special_tokens_of(config, run) == expected


@pytest.mark.parametrize(
    ("kind", "adds", "begin"), [("llama", False, []), ("byte_level", True, ["<s>"]), ("unigram", None, [])]
)
def test_a_run_begins_texts_as_its_data_does(kind, adds, begin, tmp_path):
    """Whatever the tokenizer's own file says, and with the end of a text in its vocabulary or added to it."""
    model, run = tmp_path / "model", tmp_path / "run"
    save(KINDS[kind](), model)
    settings = {"eos_token": "</s>", "bos_token": "<s>"} | ({} if adds is None else {"add_bos_token": adds})
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=model)
    run.mkdir()
    config = Config(data=DataConfig(path=str(tmp_path / "tokens")))
    save_tokenizer(config, run)
    meta, number = read_meta(tmp_path / "tokens"), load_model_tokenizer(model)[1].number_of
    shutil.rmtree(tmp_path / "tokens")
    own = load_model_tokenizer(run)[1]
    assert own.begin_of_text == list(meta.begin_of_text) == [number(name) for name in begin]
    assert own.end_of_text == meta.end_of_text == number("</s>")
    assert special_tokens_of(config, run)["eos_token_id"] == meta.end_of_text


def test_bytes_have_an_end_of_text_only_if_they_were_prepared(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens")
    for path, end in ((tmp_path / "tokens", 255), (tmp_path / "text.txt", None)):
        config = Config(data=DataConfig(path=str(path)))
        save_tokenizer(config, tmp_path)
        assert special_tokens_of(config, tmp_path)["eos_token_id"] == end
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_model_that_came_without_a_tokenizer_gets_that_of_the_data(prepared, tmp_path):
    """Its own special tokens and settings stay."""
    model, run = changed("qwen3_moe", tmp_path, **NUMBERS), tmp_path / "run"
    (model / "tokenizer_config.json").write_text('{"chat_template": "mine"}')
    run.mkdir()
    config = Config(data=DataConfig(path=str(prepared)), train=TrainConfig(init_from=str(model)))
    save_tokenizer(config, run)
    assert (run / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    assert (run / "tokenizer_config.json").read_text() == '{"chat_template": "mine"}'
    shutil.rmtree(model)
    save_tokenizer(config, run)  # as a run that resumes does
    assert (run / "tokenizer_config.json").read_text() == '{"chat_template": "mine"}'
    assert special_tokens_of(config, run) == NUMBERS
    own = dataclasses.replace(config, data=DataConfig(path=str(tmp_path / "text.txt")))
    assert special_tokens_of(own, run) == NUMBERS


def test_a_model_of_bytes_leaves_with_their_tokenizer_and_comes_back_as_one(prepared, tmp_path):
    run, model, text = tmp_path / "run", tmp_path / "model", tmp_path / "text.txt"
    for folder in (run, model):
        folder.mkdir()
    config = Config(data=DataConfig(path=str(text)))
    for file, content in byte_tokenizer_of(config, run).items():
        (model / file).write_bytes(content)
    assert byte_tokenizer_of(dataclasses.replace(config, data=DataConfig(path=str(prepared))), run) == {}
    own, theirs = ByteTokenizer(), load_model_tokenizer(model)[1]
    for each in (TEXT, "Wörter: слова 🙂\r\n\t  \x00\x7f\xa0\xad ÿ Ā", " a", ""):
        assert theirs.encode(each) == own.encode(each)
        assert theirs.decode(own.encode(each)) == own.decode(own.encode(each)) == each
    assert theirs.decode([0xFF, 0x41]) == own.decode([0xFF, 0x41])
    tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).save(str(model / "tokenizer.json"))
    assert is_byte_level(model / "tokenizer.json"), "as others write it"
    assert not any(is_byte_level(folder / "tokenizer.json") for folder in (prepared, tmp_path))
    shutil.copyfile(model / "tokenizer.json", run / "tokenizer.json")
    (run / ORIGIN).write_text("{}")
    imported = Config(train=TrainConfig(init_from=str(run)), data=DataConfig(path=str(tmp_path / "none.txt")))
    assert isinstance(tokenizer_of_run(imported, run), ByteTokenizer)
    assert byte_tokenizer_of(imported, run) == {}
    (run / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json, and its model was not trained here"):
        tokenizer_of_run(imported, run)
    begun = dataclasses.replace(config, train=TrainConfig(init_from=str(model)))
    (model / "config.json").write_text("{}")
    check_tokens(begun, new=True)
    with pytest.raises(ConfigError, match="was trained with bytes: prepare the text by"):
        check_tokens(dataclasses.replace(begun, data=DataConfig(path=str(prepared))), new=True)
    assert prepare_text(text, tmp_path / "again", tokenizer=model).tokenizer == "bytes"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}))
    lines = DataConfig(path=str(tmp_path / "text.jsonl"), tokenizer=str(model))
    assert isinstance(source_tokenizer(lines), ByteTokenizer)
