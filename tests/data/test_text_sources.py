"""A text file that is encoded while a run trains has the tokens of the folder that is prepared from it."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from array_record.python import array_record_module

from moe_jax.config import Config, DataConfig, TrainConfig
from moe_jax.config.sections import DataSource
from moe_jax.config.yaml_io import to_yaml
from moe_jax.data import documents, text_index
from moe_jax.data import tokenizer as tokenizers
from moe_jax.data.prepare import prepare_text
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens, source_tokenizer, tokenizer_file
from moe_jax.data.tokens import SPLITS
from moe_jax.errors import ConfigError, DataError
from moe_jax.run.export_tokenizer import save_tokenizer
from moe_jax.run.model_tokenizer import check_tokens, tokenizer_of_run

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "tis", "nobler", "in", "mind"]
SEQ_LEN = 8
SUFFIXES = (".jsonl", ".parquet", ".array_record", ".saved")


def texts(count: int = 60) -> list[str | None]:
    """Documents of many lengths, some of them empty."""
    choose = np.random.default_rng(0)
    made: list[str | None] = [" ".join(choose.choice(WORDS, choose.integers(1, 30))) for _ in range(count)]
    made[3], made[4], made[10] = "", None, "Wörter: слова 🙂 " * 40
    return made


def write(file: Path, documents: Sequence[str | None]) -> Path:
    if file.suffix == ".saved":
        return save_dataset(file, documents)
    if file.suffix == ".array_record":
        return write_records(file, [record_of(n, document) for n, document in enumerate(documents)])
    if file.suffix == ".parquet":
        parquet.write_table(pa.table({"body": list(documents), "n": range(len(documents))}), file, row_group_size=7)
    else:
        lines = "\n".join(
            ("\n" if n % 9 == 5 else "") + json.dumps({"n": n, "body": d}) for n, d in enumerate(documents)
        )
        file.write_text("\ufeff" + lines, encoding="utf-8")  # no line break at the end
    return file


def write_records(file: Path, records: Sequence[bytes]) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:3")
    for record in records:
        writer.write(record)
    writer.close()
    return file


def record_of(number: int, document: str | None) -> bytes:
    """JSON, or for every other one that can have it a protocol buffer."""
    if number % 2 and document is not None:
        return example({"n": number, "body": document})
    return json.dumps({"n": number, "body": document}).encode()


def example(features: dict[str, object]) -> bytes:
    """A tf.train.Example, by the format's definition."""

    def field(number: int, content: bytes) -> bytes:
        size, left = b"", len(content)
        while left > 127:
            size, left = size + bytes([left & 127 | 128]), left >> 7
        return bytes([number << 3 | 2]) + size + bytes([left]) + content

    entries = b""
    for name, value in features.items():
        feature = field(3, field(1, bytes([value]))) if isinstance(value, int) else field(1, field(1, value.encode()))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def save_dataset(folder: Path, documents: Sequence[str | None], batch: int = 7, files: int = 3) -> Path:
    """Write a folder as `save_to_disk` of `datasets` does: streams of record batches, and two JSON files."""
    folder.mkdir()
    table = pa.table({"n": range(len(documents)), "body": pa.array(documents, pa.string())})
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    for name, rows in zip(names, np.array_split(np.arange(len(documents)), files), strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table.take(rows), max_chunksize=batch)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    features = {name: {"dtype": kind, "_type": "Value"} for name, kind in (("n", "int64"), ("body", "string"))}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}, indent=2))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for suffix in SUFFIXES:
        write(folder / f"text{suffix}", texts())
    prepare_text(folder / "text.jsonl", folder / "bpe", tokenizer="bpe", vocab_size=300, text_key="body")
    return folder


def data_of(path: Path, **settings: object) -> DataConfig:
    return DataConfig(**{"path": str(path), "seq_len": SEQ_LEN, "text_key": "body"} | settings)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("fraction", [0.1, 0.37])
def test_samples_are_those_of_the_prepared_folder(
    suffix: str, tokenizer: str, fraction: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "BATCH", 500)  # one document is longer, and encoded in windows
    monkeypatch.setattr(text_index, "BATCH", 500)
    text = folder / f"text{suffix}"
    own: str | Path = "bytes" if tokenizer == "bytes" else folder / "bpe"
    meta = prepare_text(text, tmp_path / "out", tokenizer=own, validation_fraction=fraction, text_key="body")
    settings = data_of(text, tokenizer=str(own), validation_fraction=fraction)
    (here,), (there,) = open_tokens(settings, 300), open_tokens(DataConfig(path=str(tmp_path / "out"), seq_len=8), 300)
    assert here.meta == dataclasses.replace(meta, skipped=None, chunk_bytes=None)
    for split in SPLITS:
        encoded, stored = (Samples.of(tokens, split, settings) for tokens in (here, there))
        assert len(encoded) == len(stored) > 3
        order = np.random.default_rng(1).permutation(len(stored)).tolist()
        np.testing.assert_array_equal(encoded.read(order), stored.read(order))
        np.testing.assert_array_equal(encoded.read([]), stored.read([]))
    masked = dataclasses.replace(settings, mask_documents=True)
    both = [Samples.of(tokens, "train", masked).read(range(5)) for tokens in (here, there)]
    np.testing.assert_array_equal(*both)


def test_tokens_are_counted_once(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, settings = write(tmp_path / "text.jsonl", texts()), data_of(tmp_path / "text.jsonl")
    characters = sum(len(document or "") for document in texts())

    def counts(**changes: object) -> bool:
        open_tokens(dataclasses.replace(settings, **changes), 300)
        return capsys.readouterr().out == f"counting the tokens of {text}, once: {characters:,} characters\n"

    assert counts()
    assert not counts()
    assert counts(validation_fraction=0.2)
    assert counts(tokenizer=str(folder / "bpe"))
    assert not counts(tokenizer=str(folder / "bpe" / "tokenizer.json")), "another name of the same"
    os.utime(text, ns=(1, 1))
    assert counts()
    (index,) = [file for file in tmp_path.iterdir() if file.stat().st_mtime_ns == max(_times(tmp_path))]
    index.write_bytes(index.read_bytes()[:100])
    open_tokens(settings, 300)
    assert capsys.readouterr().err == f"warning: {index} is damaged: the tokens are counted again\n"
    assert not counts()


def _times(folder: Path) -> list[int]:
    return [file.stat().st_mtime_ns for file in folder.iterdir()]


def test_a_text_that_changes_while_it_is_read_stops_the_run(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", texts())
    (tokens,) = open_tokens(data_of(text), 256)
    samples = Samples.of(tokens, "train", data_of(text))
    whole = samples.read([0, 9])
    content = text.read_bytes()
    text.write_bytes(content.replace(b'"n": 1,', b'"n": 1,,', 1))
    with pytest.raises(DataError, match=rf"^{text} has changed since its tokens were counted: start again"):
        samples.read(list(range(len(samples))))
    text.write_bytes(content.replace(b"to be", b"to\\n ", 1).replace(b" is ", b" \\n ", 1))
    with pytest.raises(DataError, match=rf"^{text} has other tokens than were counted in it: start again when nothing"):
        samples.read(list(range(len(samples))))
    text.write_bytes(content)
    np.testing.assert_array_equal(samples.read([0, 9]), whole)


def refusal(settings: DataConfig) -> str:
    with pytest.raises(DataError) as error:
        open_tokens(settings, 300)
    return str(error.value)


def test_what_cannot_be_encoded_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = folder / "text.jsonl"
    assert refusal(data_of(folder / "bpe")) == (
        "data.text_key=body is for .jsonl, .parquet and .array_record files and saved datasets, and no source is one: "
        "use data.text_key=text"
    )
    assert refusal(data_of(folder / "bpe", text_key="text", tokenizer="x")).startswith("data.tokenizer=x is for .jsonl")
    assert refusal(data_of(text, tokenizer="x")) == "data.tokenizer=x must be bytes or a folder with a tokenizer.json"
    assert refusal(data_of(text, text_key="text")) == (
        f"{text}, line 1 has no 'text' but n, body: choose with data.text_key"
    )
    assert refusal(data_of(text, text_key="n")) == (
        f"{text}, line 1: 'n' is int, not text: choose another with data.text_key"
    )
    table = folder / "text.parquet"
    assert refusal(data_of(table, text_key="x")) == f"{table} has no 'x' but body, n: choose with data.text_key"
    (tmp_path / "no.parquet").write_text("no table")
    assert refusal(data_of(tmp_path / "no.parquet")).startswith(f"{tmp_path}/no.parquet cannot be read as parquet (")
    records = folder / "text.array_record"
    assert (
        refusal(data_of(records, text_key="x"))
        == f"{records}, record 0 has no 'x' but n, body: choose with data.text_key"
    )
    for content, message in {
        example({"body": 5}): "'body' is list, not text: choose another with data.text_key",
        b'{"body": 5}': "'body' is int, not text: choose another with data.text_key",
        b'{"body": "\xff"}': "is not UTF-8 (invalid start byte): repair or remove it",
        b"\x0a\x7f": "is neither a JSON object nor a tf.train.Example: write one of them",
        b"\xff\xff": "is neither a JSON object nor a tf.train.Example: write one of them",
        b"some text": "is neither a JSON object nor a tf.train.Example: write one of them",
        b"": "has no 'body' but nothing: choose with data.text_key",
    }.items():
        file = write_records(tmp_path / "one.array_record", [content])
        assert refusal(data_of(file)).removeprefix(f"{file}, record 0").lstrip(": ") == message
    file.write_bytes(b"no records")
    assert refusal(data_of(file)) == f"{file} cannot be read as array records: repair or remove it"
    (tmp_path / "one.jsonl").write_text('{"body": "a"}')
    assert refusal(data_of(tmp_path / "one.jsonl")) == (
        f"{tmp_path}/one.jsonl holds 1 characters, too few to train and validate with data.validation_fraction=0.1: "
        "give more text, or a larger fraction"
    )
    monkeypatch.setattr(documents, "_MOST_GROUP_BYTES", 100)
    assert "bytes of text in row group 0, more than the 100 that are decoded for one row: write smaller row" in refusal(
        data_of(table)
    )
    monkeypatch.setattr(np, "savez", _no_right)
    os.utime(text, ns=(1, 1))
    assert refusal(data_of(text)).endswith(
        f"cannot be written (no right): copy {text} to a folder that can be written, or prepare it with "
        "scripts/prepare_text.py"
    )


def test_every_source_is_checked_before_the_tokens_of_one_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(tmp_path / "text.jsonl", texts())
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "no.parquet").write_text("no table")
    for name in ("bad.jsonl", "no.parquet", "none.jsonl", "."):
        paths = (str(text), str(tmp_path / name))
        sources = tuple(DataSource(path=path, weight=1, name=str(number)) for number, path in enumerate(paths))
        assert refusal(DataConfig(path=None, seq_len=SEQ_LEN, text_key="body", sources=sources))
    settings = data_of(text, tokenizer=str(folder / "bpe"))
    with pytest.raises(DataError, match="has a vocabulary of 300 tokens, more than model"):
        open_tokens(settings, 299)
    monkeypatch.setattr(text_index, "check_writable", _no_right)
    assert "cannot be written (no right): copy" in refusal(data_of(text))
    assert capsys.readouterr().out == "", "nothing was counted"
    assert not list(tmp_path.glob(".text*"))


def _no_right(*_: object, **__: object) -> None:
    raise OSError(13, "no right")


def test_a_pipe_is_refused_and_an_index_of_nothing_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert refusal(data_of(tmp_path / "pipe.jsonl")).startswith(f"{tmp_path}/pipe.jsonl cannot be read: ")
    settings = data_of(write(tmp_path / "text.jsonl", texts()))
    open_tokens(settings, 256)
    (index,) = tmp_path.glob(".text*")
    with np.load(index) as found:
        arrays = dict(found)
    for name in ("train_end_D", "validation_place_D2"):
        np.savez(index, **arrays | {name: arrays[name][:0]})
        open_tokens(settings, 256)
        assert "is damaged: the tokens are counted again" in capsys.readouterr().err
    index.write_bytes(b"")
    open_tokens(settings, 256)
    assert "is damaged: the tokens are counted again" in capsys.readouterr().err


def test_a_text_among_nested_columns_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = texts()
    table = pa.table({"meta": [{"a": 1, "b": f"{n}" * 2000} for n in range(len(made))], "body": made})
    parquet.write_table(table, tmp_path / "nested.parquet", row_group_size=3)
    monkeypatch.setattr(documents, "_MOST_GROUP_BYTES", 2500)
    (tokens,) = open_tokens(data_of(tmp_path / "nested.parquet"), 256)
    assert tokens.meta
    assert tokens.meta.train_tokens > 1000


def test_a_prepared_folder_may_have_the_name_of_a_text(folder: Path, tmp_path: Path) -> None:
    (folder / "bpe").rename(tmp_path / "bpe.jsonl")
    data = data_of(tmp_path / "bpe.jsonl", text_key="text")
    (tokens,) = open_tokens(data, 300)
    assert isinstance(tokens.train, np.memmap)
    assert tokenizer_file(data) == tmp_path / "bpe.jsonl" / "tokenizer.json"
    (tmp_path / "bpe.jsonl").rename(folder / "bpe")


def test_a_text_has_the_tokenizer_that_encodes_it(folder: Path) -> None:
    data = data_of(folder / "text.jsonl", tokenizer=str(folder / "bpe"))
    assert tokenizer_file(data) == folder / "bpe" / "tokenizer.json"
    assert source_tokenizer(data).vocab_size == 300
    assert tokenizer_file(data_of(folder / "text.jsonl")) is None
    sources = (DataSource(path=str(folder / "bpe"), weight=1), DataSource(path=str(folder / "text.jsonl"), weight=1))
    mixed = Config(data=DataConfig(path=None, sources=sources, tokenizer=str(folder / "bpe"))).data
    assert tokenizer_file(mixed, 0) == tokenizer_file(mixed, 1)


def test_a_run_keeps_the_tokenizer_of_its_text_and_begins_with_no_other(folder: Path, tmp_path: Path) -> None:
    prepare_text(folder / "text.jsonl", folder / "other", tokenizer="bpe", vocab_size=290, text_key="body")
    run, text = tmp_path / "run", folder / "text.jsonl"
    config = Config(data=data_of(text, tokenizer=str(folder / "bpe")))
    run.mkdir()
    assert tokenizer_of_run(config, run).vocab_size == 300, "that of the text"
    save_tokenizer(config, run)
    (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert (run / "tokenizer.json").read_bytes() == (folder / "bpe" / "tokenizer.json").read_bytes()
    gone = Config(data=data_of(text, tokenizer=str(folder / "gone")))
    assert tokenizer_of_run(gone, run).vocab_size == 300, "its own"
    begun = TrainConfig(init_from=str(run))
    check_tokens(dataclasses.replace(config, train=begun), new=True)
    with pytest.raises(ConfigError) as refused:
        check_tokens(Config(train=begun, data=data_of(text, tokenizer=str(folder / "other"))), new=True)
    assert str(refused.value) == (
        f"data.path={text} has tokens of another tokenizer than {run}/tokenizer.json, that of train.init_from={run}: "
        f"set data.tokenizer={run}"
    )
    with pytest.raises(ConfigError, match=rf"^data.path={text} is read as bytes, and .*: set data.tokenizer={run}$"):
        check_tokens(Config(train=begun, data=data_of(text)), new=True)


def test_a_dataset_is_counted_again_if_a_file_of_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = save_dataset(tmp_path / "text", texts())
    open_tokens(data_of(text), 256)
    assert "counting" in capsys.readouterr().out
    open_tokens(data_of(text), 256)
    assert not capsys.readouterr().out
    os.utime(text / "data-00002-of-00003.arrow", ns=(1, 1))
    open_tokens(data_of(text), 256)
    assert "counting" in capsys.readouterr().out


def test_a_dataset_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    text = save_dataset(tmp_path / "text", texts())
    state, file, settings = text / "state.json", text / "data-00001-of-00003.arrow", data_of(text)
    good, content = state.read_text(), file.read_bytes()
    assert refusal(data_of(text, text_key="x")) == f"{text} has no 'x' but n, body: choose with data.text_key"
    assert refusal(data_of(text, text_key="n")) == f"{text}: 'n' is int, not text: choose another with data.text_key"
    for wrong in ("[]", "{", '{"_data_files": 3}', '{"_data_files": [{"name": "a"}]}'):
        state.write_text(wrong)
        assert refusal(settings).startswith(f"{state} is not that of a saved dataset (")
    for wrong in ("../a.arrow", "/etc/passwd", 3, None, ""):
        state.write_text(json.dumps({"_data_files": [{"filename": wrong}]}))
        assert refusal(settings) == (f"{state} names {wrong!r}, which is no file in its folder: save the dataset again")
    state.write_text('{"_data_files": []}')
    assert refusal(settings) == f"{text} is a dataset without rows: give some text"
    state.write_text(json.dumps(json.loads(good) | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert refusal(settings).endswith("order of another file: load it with datasets, and save the dataset again")
    state.write_text(good)
    for wrong_bytes in (b"", b"no stream", content[:700], content[:-300], b"\xff" * 64):
        file.write_bytes(wrong_bytes)
        assert refusal(settings).startswith(f"{file} cannot be read as Arrow's streaming format ("), wrong_bytes[:9]
    file.unlink()
    os.mkfifo(file)
    assert refusal(settings).startswith(f"{file} cannot be read as Arrow's streaming format (")
    file.unlink()
    assert "No such file" in refusal(settings)
    ends = np.cumsum([0, *(len(text or "") for text in texts()[20:22])]).astype("<i4").tobytes()
    for good_part, bad_part in ((b"not", b"\xff\xff\xff"), (ends, b"\xff" * 12), (b"body", b"\xff\xff\xff\xff")):
        file.write_bytes(content.replace(good_part, bad_part))
        assert "cannot be read as Arrow's streaming format (" in refusal(settings)


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for split in ("train", "test"):
        save_dataset(tmp_path / "all" / split, texts())
    splits = tmp_path / "all" / "dataset_dict.json"
    splits.write_text('{"splits": ["train", "test"]}')
    message = f"{tmp_path}/all has the splits train, test: name one, e.g. {tmp_path}/all/train"
    assert refusal(data_of(tmp_path / "all")) == f"data.path={message.replace('e.g. ', 'e.g. data.path=')}"
    with pytest.raises(DataError) as refused:
        prepare_text(tmp_path / "all", tmp_path / "out", text_key="body")
    assert str(refused.value) == message
    (tmp_path / "a.txt").write_text("some text " * 9)
    assert prepare_text(tmp_path, tmp_path / "out").skipped == ["all (a saved dataset, to be prepared alone)"]
    assert len(open_tokens(data_of(tmp_path / "all" / "train"), 256)[0].train) > 1000
    splits.write_text("3")
    assert refusal(data_of(tmp_path / "all")).startswith(f"{splits} cannot be read (")
