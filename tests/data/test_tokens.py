"""Token files open as they were written, and damaged ones are refused in one line with a cure."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax.config import DataConfig
from moe_jax.data.prepare import prepare_text
from moe_jax.data.sources import open_tokens
from moe_jax.data.tokens import verify_tokens
from moe_jax.errors import DataError

REMAKE = "make the folder again with scripts/prepare_text.py"
TEXT = "The quality of mercy is not strained.\n" * 50


def data(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(path=str(path), **({"seq_len": 16} | settings))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "mercy.txt").write_text(TEXT)
    return tmp_path / "mercy.txt"


@pytest.fixture
def folder(text: Path) -> Path:
    prepare_text(text, text.parent / "tokens")
    return text.parent / "tokens"


def refusal(path: Path, vocab_size: int = 256, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        open_tokens(data(path, **settings), vocab_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def change_meta(folder: Path, **values: Any) -> None:
    """Set keys of meta.json; None removes one."""
    meta = json.loads((folder / "meta.json").read_text()) | values
    meta = {key: value for key, value in meta.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(meta))


def test_a_text_file_is_its_bytes_and_its_end_validates(text: Path) -> None:
    (tokens,) = open_tokens(data(text, validation_fraction=0.25), 256)
    assert isinstance(tokens.train, np.memmap)
    assert isinstance(tokens.validation, np.memmap)
    assert tokens.train.dtype == np.uint8
    assert (tokens.train.tobytes() + tokens.validation.tobytes()).decode() == TEXT
    assert len(tokens.validation) == len(TEXT) // 4
    assert tokens.vocab_size == 256


def test_a_text_file_has_no_documents_to_mask(text: Path, folder: Path) -> None:
    assert refusal(text, mask_documents=True) == (
        f"data.mask_documents=true, and data.path={text} is one document: prepare a folder of documents with "
        "scripts/prepare_text.py, or use data.mask_documents=false"
    )
    assert open_tokens(data(folder, mask_documents=True), 256)[0].meta


def test_a_folder_has_its_own_split_and_vocabulary(folder: Path) -> None:
    (tokens,) = open_tokens(data(folder, validation_fraction=0.5), 1000)
    assert isinstance(tokens.train, np.memmap)
    assert tokens.train.tobytes() + tokens.validation.tobytes() == TEXT.encode() + b"\xff"
    assert len(tokens.validation) == len(TEXT) // 10 + 1
    assert tokens.vocab_size == 256


def test_a_missing_path_is_answered_with_the_nearest_one(text: Path, folder: Path) -> None:
    parent = text.parent
    assert refusal(parent / "merci.txt") == f"data.path={parent}/merci.txt does not exist: did you mean {text}?"
    assert refusal(parent / "token") == f"data.path={parent}/token does not exist: did you mean {folder}?"
    for nowhere in (parent / "unlike", parent / "no" / "such"):
        assert (
            refusal(nowhere)
            == f"data.path={nowhere} does not exist: name a .txt, .jsonl, .parquet or .array_record file, or a "
            "prepared folder"
        )


def test_another_kind_of_file_is_refused(text: Path) -> None:
    other = text.rename(text.with_suffix(".md"))
    assert refusal(other) == (
        f"data.path={other} is no folder, .txt, .jsonl, .parquet or .array_record file: prepare it with "
        "scripts/prepare_text.py"
    )


def test_an_empty_file_is_refused(text: Path, folder: Path) -> None:
    text.write_text("")
    assert refusal(text) == f"{text} is empty: give some text"
    (folder / "validation.bin").write_bytes(b"")
    change_meta(folder, validation_tokens=0)
    assert refusal(folder) == f"{folder}/validation.bin is empty: give some text"


def test_a_folder_of_plain_text_is_refused(text: Path) -> None:
    assert refusal(text.parent) == (
        f"data.path={text.parent} has no meta.json: make a folder from its text with scripts/prepare_text.py"
    )


def test_a_meta_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format": 1,')
    message = refusal(folder)
    assert message.startswith(f"{folder}/meta.json is not readable JSON (Expecting property name")
    assert message.endswith(f"): {REMAKE}")
    (folder / "meta.json").write_text("[1]")
    assert refusal(folder) == f"{folder}/meta.json holds no JSON object: {REMAKE}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 3}, "has format=3, and this version reads format=1 and 2"),
        ({"format": None}, "has format=None, and this version reads format=1 and 2"),
        ({"format": 2}, "has no usable seq_len"),  # of packed sequences
        ({"seq_len": 16}, "has no usable seq_len"),  # of a stream
        ({"vocab_size": None}, "has no usable vocab_size"),
        ({"train_tokens": "many", "validation_crc32": None}, "has no usable train_tokens, validation_crc32"),
        ({"dtype": "float32"}, "has no usable dtype"),
    ],
)
def test_a_meta_of_another_form_is_refused(folder: Path, change: dict[str, Any], expected: str) -> None:
    change_meta(folder, **change)
    assert refusal(folder) == f"{folder}/meta.json {expected}: {REMAKE}"


def test_a_missing_token_file_is_refused(folder: Path) -> None:
    (folder / "train.bin").unlink()
    assert refusal(folder) == f"{folder}/train.bin cannot be read (No such file or directory): {REMAKE}"


def test_a_truncated_token_file_is_refused_with_both_sizes(folder: Path) -> None:
    file = folder / "train.bin"
    file.write_bytes(file.read_bytes()[:-10])
    assert refusal(folder) == (f"{file} holds 1700 bytes, and meta.json says 1710 tokens × 1 bytes = 1710: {REMAKE}")


def test_a_vocabulary_larger_than_the_models_is_refused(text: Path, folder: Path) -> None:
    for path in (text, folder):
        assert refusal(path, vocab_size=255) == (
            f"data.path={path} has a vocabulary of 256 tokens, more than model.vocab_size=255: set "
            "model.vocab_size=256, or name text in the tokens of the model, if that is trained already"
        )


def test_a_text_shorter_than_one_sequence_is_refused(text: Path) -> None:
    text.write_text("to be or not to be")
    assert refusal(text, validation_fraction=0.3) == (
        f"data.path={text}: its train part has 13 tokens, fewer than the 17 of one sequence of data.seq_len=16: "
        "set data.seq_len=12 or less, or give more text"
    )
    assert refusal(text, validation_fraction=0.06, seq_len=5) == (
        f"data.path={text}: its validation part has 1 tokens, fewer than the 6 of one sequence of data.seq_len=5: "
        "give more text or a larger validation fraction"
    )
    open_tokens(data(text, validation_fraction=0.3, seq_len=4), 256)


def test_a_flipped_bit_is_found_by_verification_and_not_by_opening(folder: Path) -> None:
    crc32 = verify_tokens(folder).train_crc32
    file = folder / "train.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    open_tokens(data(folder), 256)
    with pytest.raises(DataError) as error:
        verify_tokens(folder)
    message = str(error.value)
    assert message.startswith(f"{file} is damaged: its crc32 is ")
    assert message.endswith(f", and meta.json says {crc32}: {REMAKE}")
