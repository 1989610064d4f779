"""Text that is no text, and folders that cannot be written: one line each, and nothing is left."""

import gzip
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_jax.data import prepare
from moe_jax.data.prepare import prepare_text
from moe_jax.errors import DataError
from tests.data.test_prepare import DOCUMENTS, TEXT, write_parquet

TOO_FEW = "too few to train and validate with --validation-fraction=0.1: give more text, or a larger fraction"


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("in.txt", "", {}, f"{{in}} holds 0 characters, {TOO_FEW}"),
        ("in.txt", "a", {}, f"{{in}} holds 1 characters, {TOO_FEW}"),
        (
            "in.txt",
            "a" * 5000,
            {"validation_fraction": 1e-9},
            f"{{in}} holds 5000 characters, {TOO_FEW.replace('0.1', '1e-09')}",
        ),
        (
            "in.txt",
            b"\0" * 5000 + b"text",
            {},
            "{in} begins with 4096 bytes of zero, which are no text: make or copy it again",
        ),
        (
            "in.md",
            "a",
            {},
            "{in} holds no .txt, .jsonl, .json, .parquet, .arrow or .array_record file: convert the text to one of "
            "them",
        ),
        (
            "in.txt",
            b"caf\xe9 noir",
            {},
            "{in} is not UTF-8 (invalid continuation byte): convert it, e.g. with iconv -f latin1 -t utf-8",
        ),
        (
            "in.jsonl",
            '{"text": "a"}\n\n{"text": "b"\n',
            {},
            "{in}, line 3 is not JSON (Expecting ',' delimiter: line 2 column 1 (char 13)): repair or remove it",
        ),
        (
            "in.json",
            '{\n "text": "a"\n}',
            {},
            "{in}, line 1 is not JSON (Expecting property name enclosed in double quotes: line 2 column 1 (char 2)): "
            "repair or remove it",
        ),
        ("in.json", '[{"text": "a"}, 3]', {}, '{in}, item 2 is not a JSON object: write {"text": "…"}'),
        (
            "in.jsonl.gz",
            gzip.compress(b"a" * 99, mtime=0)[:-9],
            {},
            "{in} cannot be unpacked (Compressed file ended before the end-of-stream marker was reached): "
            "make or copy it again",
        ),
        (
            "in.txt.gz",
            b"plain",
            {},
            "{in} cannot be unpacked (Not a gzipped file (b'pl')): make or copy it again",
        ),
        (
            "in.jsonl",
            b'{"text": "caf\xe9"}',
            {},
            "{in} is not UTF-8 (invalid continuation byte): convert it, e.g. with iconv -f latin1 -t utf-8",
        ),
        ("in.jsonl", '"a"', {}, '{in}, line 1 is not a JSON object: write {"text": "…"}'),
        (
            "in.jsonl",
            '{"text": "a"}\n{"title": "b", "body": "c"}',
            {},
            "{in}, line 2 has no 'text' but title, body: choose with --text-key",
        ),
        (
            "in.jsonl",
            '{"text": 3}',
            {},
            "{in}, line 1: 'text' is int, not text: choose another with --text-key",
        ),
        (
            "in.parquet",
            {"title": ["a"], "body": ["c"]},
            {},
            "{in} has no 'text' but title, body: choose with --text-key",
        ),
        ("in.parquet", {"text": [1]}, {}, "{in}: 'text' is int, not text: choose another with --text-key"),
        ("in.txt", TEXT, {"validation_fraction": 0}, "--validation-fraction=0 must lie between 0 and 1"),
        (
            "in.txt",
            TEXT,
            {"validation_fraction": float("nan")},
            "--validation-fraction=nan must lie between 0 and 1",
        ),
        (
            "in.txt",
            TEXT,
            {"vocab_size": 300},
            "--vocab-size=300 is for --tokenizer=bpe; bytes always have 256 tokens",
        ),
        (
            "in.txt",
            TEXT,
            {"vocab_size": 256, "tokenizer": "bpe"},
            "--vocab-size=256 must lie in 257..1048576",
        ),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    name: str, content: Any, options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    if isinstance(content, dict):
        pq.write_table(pa.table(content), source)
    else:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        prepare_text(source, tmp_path / "out", **options)
    assert str(error.value) == expected.replace("{in}", str(source))
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_text("PAR1 or not")
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path, tmp_path / "out")
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/in.parquet cannot be read as parquet (")
    assert message.endswith("): repair or remove it")
    assert "\n" not in message


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path, tmp_path / "out")
    kinds = ".txt, .jsonl, .json, .parquet, .arrow or .array_record"
    assert str(error.value) == f"{tmp_path} holds no {kinds} file: convert the text to one of them"
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path / "no", tmp_path / "out")
    assert str(error.value) == (
        f"{tmp_path}/no does not exist: name a folder or a .txt, .jsonl, .json, .parquet, .arrow or .array_record file"
    )


def test_an_output_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    for output in (tmp_path / "out", tmp_path / "in.txt"):
        with pytest.raises(DataError) as error:
            prepare_text(tmp_path / "in.txt", output)
        assert str(error.value) == f"{output} exists and is not an empty folder: name another one, or remove it"
    assert (tmp_path / "out" / "precious").read_text() == "1"


def test_an_interrupted_run_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_text(TEXT)

    def no_space(*_: object) -> None:
        assert any(tmp_path.glob(".out-*/out/*.bin"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "asdict", no_space)
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path / "in.txt", tmp_path / "out")
    assert str(error.value) == f"{tmp_path / 'out'}: No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(("package", "source"), [("tokenizers", "not even looked for"), ("pyarrow", "all.parquet")])
def test_a_missing_package_names_the_command_that_installs_it(
    package: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path, DOCUMENTS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path / source, tmp_path / "out", tokenizer="bpe")
    assert str(error.value) == f"{package} is not installed: pip install -e '.[text]'"
