"""The bytes of the text that a batch predicts, for tokenizers of several kinds."""

from pathlib import Path

import numpy as np
import pytest

from moe_jax.config import DataConfig
from moe_jax.data.evaluation import all_batches, text_bytes, text_samples
from moe_jax.data.token_marks import FIRST
from moe_jax.data.tokenizer import ByteTokenizer, load_model_tokenizer
from moe_jax.errors import DataError
from tests.data.tokenizer_kinds import KINDS, save

DOCUMENTS = ["the quick brown fox", "jumps over the lazy dog; and the dog"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bytes_are_those_of_the_predicted_text(kind: str, tmp_path: Path) -> None:
    """Those of the first token, which is not predicted, are missing; the end of a text has none."""
    tokenizer = load_model_tokenizer(save(KINDS[kind](), tmp_path))[1]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in DOCUMENTS))
    samples = text_samples(file, DataConfig(seq_len=7), tokenizer, "--data")
    first = tokenizer.decode([int(samples.tokens[0])]) if not tokenizer.begin_of_text else ""
    found = sum(text_bytes(batch, tokenizer) for batch in all_batches(samples, 4))
    assert found == pytest.approx(sum(map(len, DOCUMENTS)) - len(first.strip()), abs=len(DOCUMENTS)), "but for spaces"


@pytest.mark.parametrize("seq_len", [3, 4, 5, 7])
def test_bytes_of_letters_that_two_rows_share_are_exact(seq_len: int, tmp_path: Path) -> None:
    tokenizer = load_model_tokenizer(save(KINDS["byte_level"](), tmp_path))[1]
    text = "a€😀ü漢字 the dog 👨\u200d👩" * 3
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    samples = text_samples(tmp_path / "text.txt", DataConfig(seq_len=seq_len), tokenizer, "--data")
    assert sum(text_bytes(batch, tokenizer) for batch in all_batches(samples, 4)) == len(text.encode()) - 1


def test_bytes_of_bytes_leave_out_ends_and_first_tokens_of_documents() -> None:
    batch = np.array([[97, 98, 255, 99, 100], [97, 195, 188, 98, 99]], np.int32)
    assert text_bytes(batch, ByteTokenizer()) == 3 + 4
    batch[0, 3] |= FIRST
    assert text_bytes(batch, ByteTokenizer()) == 2 + 4


def test_documents_of_a_text_are_marked_in_its_last_row_too(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "abcdefg"}\n{"text": "hi"}\n')
    samples = text_samples(file, DataConfig(seq_len=6, mask_documents=True), ByteTokenizer(), "--data")
    (batch,) = all_batches(samples, 4)
    assert np.argwhere(batch & FIRST != 0)[:1].tolist() == [[1, 2]], "of 'h', in the row that begins with 'g'"
    assert (batch < 0).sum(axis=1).tolist() == [0, 2, 7, 7]


def test_a_text_without_a_token_to_predict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(DataError, match=r"^--data=.*one.txt has 1 tokens, too few to predict one: give more text$"):
        text_samples(tmp_path / "one.txt", DataConfig(), ByteTokenizer(), "--data")


def test_a_text_is_encoded_with_its_own_line_breaks_as_in_training(tmp_path: Path) -> None:
    content = b"one\r\n\r\ntwo\rthree\n"
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + content)
    found = text_samples(tmp_path / "marked.txt", DataConfig(seq_len=4), ByteTokenizer(), "--data")
    assert bytes(found.tokens.tolist()) == content, "without a byte order mark, which prepare_text leaves out, too"
