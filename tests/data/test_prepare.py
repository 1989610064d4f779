"""scripts/prepare_text.py turns any text into tokens that are that text, or says in one line why not."""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_jax.config import DataConfig
from moe_jax.data import long_text, prepare, text_files
from moe_jax.data.prepare import prepare_text
from moe_jax.data.sources import open_tokens
from moe_jax.data.tokenizer import load_tokenizer
from moe_jax.data.tokens import read_meta, verify_tokens
from moe_jax.errors import DataError
from tests.data.tokenizer_kinds import KINDS, LINES, save

ROOT = Path(__file__).parents[2]
TEXT = "Wörter, слова, 言葉 and words.\r\n" * 40
DOCUMENTS = [f"document {i}: {TEXT[i:]}" for i in range(9)] + ["the last one"]


def write_txt(folder: Path, documents: list[str]) -> None:
    for i, text in enumerate(documents):
        file = folder / f"deep{i // 4}" / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8-sig", newline="")  # its byte order mark is no text


def write_jsonl(folder: Path, documents: list[str]) -> None:
    for part, texts in (("a.jsonl", documents[:6]), ("b.JSONL", documents[6:])):
        lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=part == "a.jsonl") for text in texts]
        (folder / part).write_text("\n\n".join([*lines, '{"text": ""}', '{"text": null}']))


def write_parquet(folder: Path, documents: list[str]) -> None:
    table = pa.table({"id": range(len(documents) + 1), "text": [*documents, None]})
    pq.write_table(table, folder / "all.parquet", row_group_size=3)


def decoded(folder: Path) -> list[str]:
    """Train and validation tokens as text, with ␄ after each document."""
    meta, tokenizer = verify_tokens(folder), load_tokenizer(folder)
    texts = []
    for split in ("train", "validation"):
        tokens = np.fromfile(folder / f"{split}.bin", meta.dtype)
        ends = np.flatnonzero(tokens == meta.end_of_text)
        texts.append("␄".join(tokenizer.decode(part[part != meta.end_of_text]) for part in np.split(tokens, ends)))
    return texts


@pytest.mark.parametrize("write", [write_txt, write_jsonl, write_parquet])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_tokens_are_the_text_whatever_its_form(
    write: Callable[[Path, list[str]], None], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.md").write_text("not text to train on")
    write(tmp_path / "in", DOCUMENTS)
    vocab_size = 400 if tokenizer == "bpe" else None
    meta = prepare_text(
        tmp_path / "in", tmp_path / "out", tokenizer=tokenizer, vocab_size=vocab_size, validation_fraction=0.25
    )
    train, validation = decoded(tmp_path / "out")
    assert train + validation == "".join(f"{text}␄" for text in DOCUMENTS)
    characters = sum(map(len, DOCUMENTS))
    assert len(validation.replace("␄", "")) == characters // 4  # a document may be divided
    assert meta.dtype == ("uint16" if tokenizer == "bpe" else "uint8")
    assert open_tokens(DataConfig(path=str(tmp_path / "out"), seq_len=8), 400)[0].vocab_size == meta.vocab_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_text_longer_than_one_piece_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(prepare, "_BATCH", 200)
    (tmp_path / "in.txt").write_bytes(TEXT.encode())
    for tokenizer in ("bytes", "bpe"):
        prepare_text(tmp_path / "in.txt", tmp_path / tokenizer, tokenizer=tokenizer)  # type: ignore[arg-type]
        assert "".join(decoded(tmp_path / tokenizer)) == f"{TEXT}␄"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tokens_are_those_of_whole_documents(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a document is read: no spaces or special tokens at the places where pieces of it meet."""
    monkeypatch.setattr(text_files, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(prepare, "_BATCH", 500)
    monkeypatch.setattr(long_text, "WINDOW", 200)
    monkeypatch.setattr(long_text, "OVERLAP", 120)
    made = KINDS[kind]()
    model = save(made, tmp_path / "model")
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    texts = [f"{number}: {' '.join(LINES * 8)}"[: 30 + 900 * (number % 3)] for number in range(6)]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    validation = sum(map(len, texts[3:])) / sum(map(len, texts)) + 1e-9  # no document is divided
    meta = prepare_text(tmp_path / "in", tmp_path / "out", tokenizer=model, validation_fraction=validation)
    begin = [made.token_to_id("<s>")] if kind in ("llama", "roberta") else []
    end = made.token_to_id("</s>")
    assert (meta.begin_of_text, meta.end_of_text) == (begin, end)
    for split, documents in (("train", texts[:3]), ("validation", texts[3:])):
        wanted = [[*begin, *made.encode(text, add_special_tokens=False).ids, end] for text in documents]
        found = np.fromfile(tmp_path / "out" / f"{split}.bin", meta.dtype)
        np.testing.assert_array_equal(found, np.concatenate(wanted), err_msg=split)


def test_settings_of_a_tokenizer_file_for_truncation_and_padding_are_not_obeyed(tmp_path: Path) -> None:
    made = KINDS["byte_level"]()
    plain = save(made, tmp_path / "plain")
    made.enable_truncation(max_length=16)
    truncating = save(made, tmp_path / "truncating")
    made.no_truncation()
    made.enable_padding(pad_id=0, pad_token="<unk>")
    padding = save(made, tmp_path / "padding")
    settings = json.loads((plain / "tokenizer.json").read_text())
    settings["model"]["dropout"] = 0.5
    chance = tmp_path / "chance"
    chance.mkdir()
    (chance / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*DOCUMENTS, "a")))
    for model in (plain, truncating, padding, chance):
        prepare_text(tmp_path / "in.jsonl", tmp_path / "out" / model.name, tokenizer=model)
        for split in ("train", "validation"):
            tokens = (tmp_path / "out" / model.name / f"{split}.bin").read_bytes()
            assert tokens == (tmp_path / "out" / "plain" / f"{split}.bin").read_bytes(), (model.name, split)
    assert "".join(decoded(tmp_path / "out" / "truncating")) == "".join(f"{text}␄" for text in (*DOCUMENTS, "a"))


def test_every_kind_of_file_is_read_and_what_is_not_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, lines = tmp_path / "in", [json.dumps({"text": text}) for text in DOCUMENTS[:6]]
    (source / ".ipynb_checkpoints").mkdir(parents=True)
    (source / "sub").mkdir()
    (source / ".ipynb_checkpoints" / "0.txt").write_text("an old copy")
    (source / ".secret.txt").write_text("not for training")
    (source / "a.jsonl").write_text(lines[0])
    with gzip.open(source / "b.JSONL.gz", "wt") as file:
        file.write(lines[1])
    (source / "c.json").write_text(lines[2])
    (source / "d.json").write_text(f"\n[{lines[3]},\n{lines[4]}]")
    with gzip.open(source / "e.txt.gz", "wt", newline="") as file:
        file.write(DOCUMENTS[5])
    (source / "empty.txt").write_text("")
    (source / "notes.md").write_text("no text")
    (source / "sub" / "data.jsonl.zst").write_text("no text")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "f.txt").write_text(DOCUMENTS[6], newline="")
    (source / "sub" / "link").symlink_to(tmp_path / "linked")
    (source / "sub" / "loop").symlink_to(source)
    prepare_text(tmp_path / "linked", source / "tokens")
    meta = prepare_text(source, tmp_path / "out")
    assert "".join(decoded(tmp_path / "out")) == "".join(f"{text}␄" for text in DOCUMENTS[:7])
    assert meta.sources == [
        *("a.jsonl", "b.JSONL.gz", "c.json", "d.json", "e.txt.gz", "empty.txt", "sub/link/f.txt"),
    ]
    skipped = [
        ".ipynb_checkpoints (hidden)",
        ".secret.txt (hidden)",
        "notes.md (not a kind of file that is read)",
        "sub/data.jsonl.zst (not a kind of file that is read)",
        f"sub/loop (the same folder as {source})",
        "tokens (a prepared folder of tokens)",
    ]
    assert (meta.skipped, read_meta(tmp_path / "out").skipped) == (skipped, skipped)
    assert capsys.readouterr().out == "".join(f"skipped: {name}\n" for name in skipped)


def test_of_many_skipped_files_some_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for number in range(25):
        (tmp_path / "in" / f"{number}.png").touch()
    (tmp_path / "in" / "in.txt").write_text(TEXT)
    assert len(prepare_text(tmp_path / "in", tmp_path / "out").skipped or ()) == 25
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[-1] == f"skipped: 5 more, listed in {tmp_path / 'out' / 'meta.json'}"


def test_lone_surrogates_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": text}) for text in ("a pair \U0001f600", "a half \ud83d", "two \udfff \ud800")]
    (tmp_path / "text.jsonl").write_text("\n".join(lines * 9))
    prepare_text(tmp_path / "text.jsonl", tmp_path / "tokens")
    assert "warning: 27 lone surrogates" in capsys.readouterr().out


@pytest.mark.parametrize("call", ["scandir", "stat", "open"])
def test_what_cannot_be_read_is_refused_by_name(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights do not keep the superuser out, so the system's answer is made."""
    (tmp_path / "in" / "closed").mkdir(parents=True)
    (tmp_path / "in" / "in.txt").write_text(TEXT)
    (tmp_path / "in" / "closed" / "more.txt").write_text(TEXT)
    closed = tmp_path / "in" / "closed" / ("more.txt" if call == "open" else "")
    module = os if call == "scandir" else Path
    asked = getattr(module, call)

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return asked(path, *arguments, **options)

    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path / "in", tmp_path / "out")
    assert str(error.value) == f"{closed} cannot be read (Permission denied): make it readable, or move it away"
    assert not (tmp_path / "out").exists()


def test_links_and_pipes_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "in.txt").write_text(TEXT)
    (source / "nowhere.txt").symlink_to(source / "none")
    for make, what in (
        (lambda path: path.symlink_to(source / "none"), "a link to what does not exist"),
        (lambda path: path.symlink_to(path), "a link to what does not exist"),
        (os.mkfifo, "neither a file nor a folder"),
    ):
        (source / "nowhere.txt").unlink()
        make(source / "nowhere.txt")
        with pytest.raises(DataError) as error:
            prepare_text(source, tmp_path / "out")
        assert str(error.value) == f"{source}/nowhere.txt is {what}: remove it, or name another file or folder"


@pytest.mark.parametrize(
    ("encoding", "named"),
    [
        *(("utf-16", "utf-16"), ("utf-32", "utf-32"), ("utf-16-le", "utf-16le"), ("utf-16-be", "utf-16be")),
        *(("utf-32-le", "utf-32le"), ("utf-32-be", "utf-32be")),
    ],
)
def test_the_cure_of_an_encoding_makes_the_text(encoding: str, named: str, tmp_path: Path) -> None:
    text = "Hello, Wörld! слова\n" * 20
    for name in ("in.txt", "in.jsonl", "in.txt.gz"):
        content = text.encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
        with pytest.raises(DataError) as error:
            prepare_text(tmp_path / name, tmp_path / "out")
        cure = f"iconv -f {named} -t utf-8"
        assert str(error.value) == f"{tmp_path / name} is {named.upper()}, not UTF-8: convert it with {cure}"
    with pytest.raises(DataError) as error:  # without preparation, too
        open_tokens(DataConfig(path=str(tmp_path / "in.txt"), seq_len=8), 256)
    assert str(error.value) == f"{tmp_path / 'in.txt'} is {named.upper()}, not UTF-8: convert it with {cure}"
    iconv = subprocess.run([*cure.split(), tmp_path / "in.txt"], capture_output=True, check=True)
    assert iconv.stdout.decode() == text


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    split = prepare._split

    def after_a_change(*arguments: Any) -> Any:
        (tmp_path / "in.txt").write_text(f"{TEXT}and more")
        return split(*arguments)

    monkeypatch.setattr(prepare, "_split", after_a_change)
    with pytest.raises(DataError, match=r"in.txt has changed while it was read: start again when nothing writes"):
        prepare_text(tmp_path / "in.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_between_two_documents_divides_none(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "aaa"}\n{"body": "b"}\n')
    prepare_text(tmp_path / "in.jsonl", tmp_path / "out", text_key="body", validation_fraction=0.25)
    assert decoded(tmp_path / "out") == ["aaa␄", "b␄"]


def test_the_same_text_gives_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()  # an empty output is as good as none
        prepare_text(tmp_path / "in.txt", tmp_path / name, tokenizer="bpe", vocab_size=300)
    for file in ("train.bin", "validation.bin", "meta.json", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/prepare_text.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_makes_verifies_and_refuses(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("ab" * 500)
    output = tmp_path / "new" / "out"
    made = run_script(tmp_path / "in.txt", output, "--validation-fraction", "0.2")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == (
        f"800 tokens to train and 201 to validate (text files: 1); use data.path={output} model.vocab_size=256\n"
    )
    verified = run_script("--verify", output)
    assert (verified.returncode, verified.stdout) == (0, made.stdout)
    (output / "train.bin").write_bytes(b"x" * 800)
    for refused in (run_script("--verify", output), run_script(tmp_path / "in.txt", output)):
        assert refused.returncode == 2
        assert re.fullmatch(r"error: .+\n", refused.stderr)
        assert refused.stdout == ""
