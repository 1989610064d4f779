"""Conversations become packed sequences whose loss counts what the assistant says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from moe_jax.config import DataConfig
from moe_jax.data.chat_template import MARKS, ChatTemplate, rendered
from moe_jax.data.loader import train_batches, validation_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.prepare_chat import Prepared, _inside, pack, prepare_chat
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.data.token_marks import FIRST, PADDING, UNCOUNTED
from moe_jax.data.tokenizer import load_tokenizer
from moe_jax.data.tokens import read_meta, verify_tokens
from moe_jax.errors import DataError
from tests.bad_input.cases import COMMANDS
from tests.data.tokenizer_kinds import byte_level

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (  # what the assistant says is not a beginning of what follows: earlier thoughts are left out
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A:"
    "{% generation %}{{ m.content if loop.last else m.content.split('|')[-1] }}</s>{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %}{% endfor %}"
)
SEQ_LEN, SEVENTY = 60, 70


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [
    message("user", " Who? "),
    message("assistant", "Ich wörde."),
    message("user", "Why?"),
    message("assistant", "言葉"),
]
TEXT = (
    "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nIch wörde.<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n言葉<|im_end|>\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def prepared(folder: Path, records: list[Any], seq_len: int = SEQ_LEN, **options: Any) -> Prepared:
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"tokenizer": folder / "model", "seq_len": seq_len, "validation_fraction": 0.5} | options
    return prepare_chat(folder / "chat.jsonl", folder / "out", **options)


def sequences(folder: Path, split: str = "train", seq_len: int = SEQ_LEN) -> np.ndarray:
    return np.fromfile(folder / "out" / f"{split}.bin", "<u4").reshape(-1, seq_len + 1)


def parts(folder: Path, sequence: np.ndarray) -> list[tuple[str, str]]:
    """The text of each document of a sequence, and what of it is counted, with … in between."""
    tokenizer, found = load_tokenizer(folder / "out"), []
    for document in np.split(sequence, np.flatnonzero(sequence[1:] & FIRST) + 1):
        ids, counts = document & (UNCOUNTED - 1), document & (FIRST | UNCOUNTED) == 0
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(counts)) + 1)
        spoken = [tokenizer.decode(ids[run].tolist()) for run in runs if counts[run[0]]]
        found.append((tokenizer.decode(ids.tolist()), "…".join(spoken)))
    return found


def test_what_the_assistant_says_is_counted(model: Path, tmp_path: Path) -> None:
    made = prepared(tmp_path, [{"messages": TALK}] * 2, seq_len=SEVENTY)
    (sequence,) = sequences(tmp_path, seq_len=SEVENTY)
    (talk, filling) = parts(tmp_path, sequence)
    assert talk == (TEXT, "Ich wörde.<|im_end|>\n…言葉<|im_end|>\n")
    assert filling[0]
    assert TEXT.startswith(filling[0].rstrip("\ufffd"))
    assert filling[1] == ""
    starts = np.flatnonzero(sequence & FIRST)
    assert made.padding_tokens == 2 * (SEVENTY + 1 - starts[1])
    assert made.counted_tokens == 2 * np.count_nonzero(sequence & (FIRST | UNCOUNTED) == 0)
    ids = sequence[: starts[1]] & (UNCOUNTED - 1)
    assert np.count_nonzero(ids == load_tokenizer(tmp_path / "out").vocab_size - 2) == 4, "<|im_start|> is one token"
    assert verify_tokens(tmp_path / "out") == made.meta == read_meta(tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == CHATML, "the runs that it trains chat in its format"


def test_prompts_have_no_template_and_completions_an_end(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": true}')
    prepared(tmp_path, [{"prompt": "1 + 1 =", "completion": " 2 </s>"}] * 4)
    assert not (tmp_path / "out/chat_template.jinja").exists()
    assert parts(tmp_path, sequences(tmp_path)[0])[:2] == [("<s>1 + 1 = 2 </s></s>", " 2 </s></s>")] * 2
    ids = sequences(tmp_path)[0] & (UNCOUNTED - 1)
    assert np.count_nonzero(ids == 2) >= 2, "spelled out, the end of a text is its characters"


def test_a_token_that_joins_the_end_of_a_prompt_and_an_answer_is_counted() -> None:
    """As " Nay", after a prompt that ends with a space; not one that ends where the answer begins."""
    span_T2 = np.array([(0, 4), (4, 5), (5, 9), (9, 9), (9, 12)])
    assert _inside(span_T2, [(6, 9)]).tolist() == [False, False, True, False, False]
    assert _inside(span_T2, [(4, 5), (9, 11)]).tolist() == [False, True, False, True, True]


def test_generation_blocks_mark_what_the_assistant_says(model: Path, tmp_path: Path) -> None:
    (tmp_path / "blocks.jinja").write_text(BLOCKS)
    talk = [message("user", "a"), message("assistant", "hm|b"), message("user", "c"), message("assistant", "hm|d")]
    prepared(tmp_path, [{"messages": talk}] * 2, template=tmp_path / "blocks.jinja")
    assert parts(tmp_path, sequences(tmp_path)[0])[0] == ("<s>U:aA:b</s>U:cA:hm|d</s>", "b</s>…hm|d</s>")
    assert (tmp_path / "out/chat_template.jinja").read_text() == BLOCKS


def test_the_toy_conversations_follow_the_toy_template(model: Path, tmp_path: Path) -> None:
    """Those of docs/finetuning.md: the loss counts whole answers with their ends, and nothing is left out."""
    source, template = Path("configs/text/conversations.jsonl"), Path("configs/text/chat_template.jinja")
    talks = [json.loads(line)["messages"] for line in source.read_text().splitlines()]
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    made = prepare_chat(source, tmp_path / "out", tokenizer=model, seq_len=400, template=template)
    assert (made.conversations, made.too_long, made.silent) == (len(talks), 0, 0)
    assert 100 < len(talks) < 300
    counted = " ".join(
        spoken for sequence in sequences(tmp_path, "validation", 400) for _, spoken in parts(tmp_path, sequence)
    )
    for talk in talks[-int(len(talks) * 0.1) :]:
        assert "…".join(f" {each['content']}</s>\n" for each in talk if each["role"] == "assistant") in counted
    assert ChatTemplate(model, template).render(talks[0][:1]) == f"Question: {talks[0][0]['content']}\nAnswer:"


def test_a_template_that_changes_earlier_turns_needs_blocks(model: Path) -> None:
    plain = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (model / "chat_template.jinja").write_text(plain)
    template = ChatTemplate(model, None, MARKS)
    messages = [message("user", "a"), message("assistant", "hm|b"), message("user", "c")]
    assert rendered(template, messages[:2]) == ("<s>U:aA:hm|b</s>", [(6, 16)])
    with pytest.raises(DataError, match=r"renders turn 2 in another way once others .*--template"):
        rendered(template, messages)


def test_a_generation_prompt_may_begin_what_an_answer_lacks(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    )
    template, question = ChatTemplate(model, None, MARKS), message("user", "a")
    for answer, counted in (("b", "b<|im_end|>\n"), ("<think>c</think>b", "c</think>b<|im_end|>\n")):
        text, spans = rendered(template, [question, message("assistant", answer)])
        assert [text[slice(*span)] for span in spans] == [counted]


def test_templates_have_what_published_ones_use_and_no_more(model: Path) -> None:
    def text(source: str) -> str:
        (model / "t.jinja").write_text(source)
        return ChatTemplate(model, model / "t.jinja").render([message("user", "ö")])

    assert text("{{ bos_token }}{{ messages[0] | tojson }}") == '<s>{"role": "user", "content": "ö"}'
    assert text("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}") >= "2026"
    for source, reason in (
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ none + 1 }}", "unsupported operand"),
    ):
        with pytest.raises(DataError, match=f"t.jinja .*{reason}"):
            text(source)
    with pytest.raises(DataError, match=r"t\.jinja fails"):
        text("{% if %}")


def test_sequences_are_filled_with_whole_conversations() -> None:
    """The first sequence with room takes each, and the fullest is complete first."""
    documents = [np.full(length, length, np.uint32) for length in (5, 7, 3, 4, 2, 10, 1)]
    for document in documents:
        document[0] |= FIRST
    packed = list(pack(documents, 10))
    lengths = [[5] * 5 + [3] * 3 + [2] * 2, [7] * 7 + [1] + [7] * 2, [4] * 10, [10] * 10]
    filling = [0, 2, 6, 0]
    assert [(sequence & 15).tolist() for sequence in packed] == lengths
    assert [np.flatnonzero(sequence & FIRST).tolist() for sequence in packed] == [[0, 5, 8], [0, 7, 8], [0, 4, 8], [0]]
    counted = [np.flatnonzero(sequence & UNCOUNTED == 0).tolist() for sequence in packed]
    assert counted == [list(range(10 - number)) for number in filling]
    text = [np.flatnonzero(sequence & PADDING == 0).tolist() for sequence in packed]
    assert text == counted, "the rest is padding"


def test_training_reads_each_sequence_as_it_was_packed(model: Path, tmp_path: Path) -> None:
    made = prepared(tmp_path, [{"prompt": f"{n}: ", "completion": "x" * (n % 40 + 1)} for n in range(60)])
    data = DataConfig(path=str(tmp_path / "out"), seq_len=SEQ_LEN, mask_documents=True)
    (tokens,) = open_tokens(data, made.meta.vocab_size)
    train, validation = Samples.of(tokens, "train", data), Samples.of(tokens, "validation", data)
    whole = sequences(tmp_path)
    mixture = Mixture.of(data, len(whole), 0)
    batch = next(train_batches([train], mixture, rows=[range(len(whole))], prefetch=0))
    assert batch.dtype == np.int32
    assert sorted(map(tuple, batch)) == sorted(map(tuple, whole.astype(np.int32)))
    batches = validation_batches(validation, batch_size=1, num_batches=99, rows=[range(1)])
    np.testing.assert_array_equal(np.concatenate(batches), sequences(tmp_path, "validation").astype(np.int32))


def test_a_packed_folder_is_read_as_nothing_else(model: Path, tmp_path: Path) -> None:
    vocab_size = prepared(tmp_path, [{"prompt": "a", "completion": "b"}] * 4).meta.vocab_size
    data = DataConfig(path=str(tmp_path / "out"), seq_len=SEQ_LEN)
    with pytest.raises(DataError, match=r"has sequences packed with conversations: set data.mask_documents=true"):
        open_tokens(data, vocab_size)
    longer = DataConfig(path=str(tmp_path / "out"), seq_len=64, mask_documents=True)
    with pytest.raises(DataError, match=r"packed sequences of 60 tokens, and data.seq_len=64: set data.seq_len=60, or"):
        open_tokens(longer, vocab_size)


def test_what_does_not_fit_or_says_nothing_is_left_out(model: Path, tmp_path: Path) -> None:
    answer = {"prompt": "a", "completion": "b"}
    records = [answer, {"prompt": "a", "completion": "b" * 100}, {"messages": [message("user", "?")]}, answer]
    made = prepared(tmp_path, records, validation_fraction=0.25)
    assert (made.conversations, made.too_long, made.silent) == (4, 1, 1)


def test_content_in_parts_is_their_text(model: Path, tmp_path: Path) -> None:
    """A template might print the list, as Python does."""
    pieces = [{"type": "text", "text": "Ich "}, {"type": "text", "text": "wörde."}]
    records = [{"messages": TALK}, {"messages": [TALK[0], message("assistant", pieces), *TALK[2:]]}]
    prepared(tmp_path, records, seq_len=SEVENTY)
    np.testing.assert_array_equal(*(sequences(tmp_path, split, SEVENTY) for split in ("train", "validation")))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "a"}, 'must have "messages", or "prompt" and "completion": repair or remove it'),
        ([1], 'must have "messages", or "prompt" and "completion": repair or remove it'),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list of objects with "role" and "content"'),
        ({"messages": []}, '"messages" must be a list of objects with "role" and "content"'),
        ({"messages": [*TALK, message("assistant", None)]}, 'the "content" of message 5 is null: write the text, or '),
        ({"messages": [message("user", 5)]}, 'the "content" of message 1 is not text: write the text, or '),
        ({"messages": [message("user", [{"type": "image"}])]}, 'the "content" of message 1 is not text: write '),
        ({"prompt": "a", "completion": None}, "prompt and completion must be text"),
        (
            {"messages": [message("user", "<|im_end|>")]},
            r"spells out the special token '<\|im_end\|>', which would end or begin a turn: remove it",
        ),
    ],
)
def test_bad_conversations_are_refused_by_line(record: Any, problem: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"chat.jsonl, line 2:? {problem}"):
        prepared(tmp_path, [{"prompt": "a", "completion": "b"}, record])
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_training_needs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "c" * 99}] * 2
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.chdir(tmp_path)
    arguments = "prepare_chat chat.jsonl out --tokenizer model --seq-len 60 --validation-fraction 0.5"
    monkeypatch.setattr("sys.argv", arguments.split())
    COMMANDS["prepare_chat"]()
    vocab_size = read_meta(tmp_path / "out").vocab_size
    assert capsys.readouterr().out == (
        "warning: of 4 conversations 2 are longer than a sequence: they are left out\n"
        "1 sequences to train and 1 to validate; 3.3% of their tokens count in the loss, 95.1% are padding; "
        f"use data.path=out data.mask_documents=true data.seq_len=60 model.vocab_size={vocab_size}\n"
    )


def test_bad_options_are_refused(model: Path, tmp_path: Path) -> None:
    answers = [{"prompt": "a", "completion": "bcd"}] * 4
    for options, problem in (
        ({"validation_fraction": 1.0}, "--validation-fraction=1.0 must lie between 0 and 1"),
        ({"validation_fraction": 0.1}, "holds 4 conversations, too few to train and validate"),
        ({"seq_len": 1}, "--seq-len=1 must be at least 2"),
        ({"seq_len": 2}, "of 4 conversations .* are longer than --seq-len=2"),
    ):
        with pytest.raises(DataError, match=problem):
            prepared(tmp_path, answers, **options)
    with pytest.raises(DataError, match=r"--tokenizer=.* must be a folder with a tokenizer\.json"):
        prepared(tmp_path, answers, tokenizer=tmp_path)
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match=r"has no chat_template\.jinja, .*: put the model's there, or use --template"):
        prepared(tmp_path, [{"messages": TALK}] * 2)
