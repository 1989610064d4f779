"""Texts, token folders and config files that are missing, damaged or of another kind."""

import pytest

from tests.bad_input.cases import Refusal, cases

DATA = [
    (
        "no text",
        "data.path=",
        "data.path is empty: name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder",
    ),
    ("a missing text", "data.path=txt.txt", "data.path=txt.txt does not exist: did you mean text.txt?"),
    (
        "a missing folder",
        "data.path=a/b/c",
        "data.path=a/b/c does not exist: name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder",
    ),
    ("an empty text", "data.path=empty.txt", "empty.txt is empty: give some text"),
    (
        "another kind of file",
        "data.path=page.html",
        "data.path=page.html is no folder, .txt, .jsonl, .parquet or .array_record file: prepare it with "
        "scripts/prepare_text.py",
    ),
    (
        "a text shorter than a sequence",
        "data.path=short.txt",
        "data.path=short.txt: its train part has 9 tokens, fewer than the 17 of one sequence of data.seq_len=16: "
        "set data.seq_len=8 or less, or give more text",
    ),
    (
        "a validation text shorter than a batch",
        "data.path=middle.txt",
        "the validation text holds 1 sequences of data.seq_len=16 tokens, fewer than one batch of train.batch_size=8: "
        "use a smaller train.batch_size or data.seq_len, or a larger data.validation_fraction "
        "(of a prepared folder: --validation-fraction)",
    ),
    (
        "more tokens than the model knows",
        "data.path=bpe",
        "data.path=bpe has a vocabulary of 260 tokens, more than model.vocab_size=256: set model.vocab_size=260, "
        "or name text in the tokens of the model, if that is trained already",
    ),
    (
        "a folder of something else",
        "data.path=full",
        "data.path=full has no meta.json: make a folder from its text with scripts/prepare_text.py",
    ),
    (
        "a damaged meta.json",
        "data.path=bad_meta",
        "bad_meta/meta.json holds no JSON object: make the folder again with scripts/prepare_text.py",
    ),
    (
        "tokens cut short",
        "data.path=cut_tokens",
        "cut_tokens/train.bin holds 3 bytes, and meta.json says 2376 tokens × 1 bytes = 2376: "
        "make the folder again with scripts/prepare_text.py",
    ),
    (
        "tokens missing",
        "data.path=no_tokens",
        "no_tokens/validation.bin cannot be read (No such file or directory): "
        "make the folder again with scripts/prepare_text.py",
    ),
]

CONFIG_FILES = [
    ("a missing file", "train --config tiiny.yaml", "config file tiiny.yaml does not exist: did you mean tiny.yaml?"),
    (
        "a file in no folder",
        "train --config a/b.yaml",
        "config file a/b.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "a folder without a config",
        "train --config full",
        "config file full/config.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "a name too long",
        f"train --config {'x' * 300}",
        f"config file {'x' * 300} cannot be read (File name too long): name a YAML file",
    ),
    (
        "a binary file",
        "train --config binary.yaml",
        "config file binary.yaml cannot be read (it is not UTF-8 text): name a YAML file",
    ),
    (
        "another text",
        "train --config text.txt",
        "config file text.txt holds text, not sections: start it with e.g. 'model:'",
    ),
    (
        "a list",
        "train --config list.yaml",
        "config file list.yaml holds a list, not sections: start it with e.g. 'model:'",
    ),
    (
        "an open bracket",
        "train --config broken.yaml",
        "broken.yaml: expected ',' or '}', but got '<stream end>' at line 2, column 1",
    ),
    (
        "a key twice",
        "train --config twice.yaml",
        "twice.yaml: key 'steps' stands twice in the section at line 2: keep one",
    ),
]

PREPARED = [
    (
        "prepare_text: a missing text",
        "prepare_text nowhere out",
        "nowhere does not exist: name a folder or a .txt, .jsonl, .json, .parquet, .arrow or .array_record file",
    ),
    (
        "prepare_text: an empty text",
        "prepare_text empty.txt out",
        "empty.txt holds 0 characters, too few to train and validate with --validation-fraction=0.1: give more text, "
        "or a larger fraction",
    ),
    (
        "prepare_text: another encoding",
        "prepare_text latin1.txt out",
        "latin1.txt is not UTF-8 (invalid continuation byte): convert it, e.g. with iconv -f latin1 -t utf-8",
    ),
    (
        "prepare_text: another kind of file",
        "prepare_text page.html out",
        "page.html holds no .txt, .jsonl, .json, .parquet, .arrow or .array_record file: convert the text to one of "
        "them",
    ),
    (
        "prepare_text: damaged JSON",
        "prepare_text broken.jsonl out",
        "broken.jsonl, line 2 is not JSON (Expecting value: line 2 column 1 (char 10)): repair or remove it",
    ),
    (
        "prepare_text: another key",
        "prepare_text other_key.jsonl out",
        "other_key.jsonl, line 1 has no 'text' but body: choose with --text-key",
    ),
    (
        "prepare_text: over other files",
        "prepare_text text.txt full",
        "full exists and is not an empty folder: name another one, or remove it",
    ),
    (
        "prepare_text: no fraction",
        "prepare_text text.txt out --validation-fraction 2",
        "--validation-fraction=2.0 must lie between 0 and 1",
    ),
    (
        "prepare_text: a vocabulary without bytes",
        "prepare_text text.txt out --tokenizer bpe --vocab-size 100",
        "--vocab-size=100 must lie in 257..1048576",
    ),
    (
        "prepare_text: verify what is cut short",
        "prepare_text cut_tokens --verify",
        "cut_tokens/train.bin holds 3 bytes, and meta.json says 2376 tokens × 1 bytes = 2376: "
        "make the folder again with scripts/prepare_text.py",
    ),
]


@pytest.mark.parametrize(("words", "message"), cases(DATA))
def test_data_that_cannot_be_read(words: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"train --config tiny.yaml {words}", message)


@pytest.mark.parametrize(("line", "message"), cases(CONFIG_FILES + PREPARED))
def test_files_that_cannot_be_read(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(line, message)
