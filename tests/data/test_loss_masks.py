"""The loss mask of ten conversations in three styles of chat templates, against a table written by hand.

⟦ and ⟧ stand around what the loss counts.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from moe_jax.data.prepare_chat import prepare_chat
from moe_jax.data.token_marks import FIRST, UNCOUNTED
from moe_jax.data.tokenizer import load_tokenizer
from tests.data.tokenizer_kinds import byte_level

SEQ_LEN = 120
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]")
STYLES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # as of Llama 3: every turn has a header, and its text is trimmed
    "headers": "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
    # as of Mistral: a system prompt stands in the first user's turn, and only answers end
    "inst": "{{ bos_token }}{% set s = namespace(text='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set s.text = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ s.text }}{{ m.content }}[/INST]{% set s.text = '' %}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
# roles by their first letters, what they say, and the text in each style
TABLE: list[tuple[str, list[str], str, str, str]] = [
    (
        "ua",
        ["Hi", "Yo"],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nHi<|eot|><|head|>assistant<|/head|>\n\n⟦Yo<|eot|>⟧",
        "<s>[INST] Hi[/INST]⟦ Yo</s>⟧",
    ),
    (
        "sua",
        ["Short", "Hi", "Yo"],
        "<|im_start|>system\nShort<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>\n⟧",
        "<s><|head|>system<|/head|>\n\nShort<|eot|><|head|>user<|/head|>\n\nHi<|eot|>"
        "<|head|>assistant<|/head|>\n\n⟦Yo<|eot|>⟧",
        "<s>[INST] Short\n\nHi[/INST]⟦ Yo</s>⟧",
    ),
    (
        "uaua",
        ["1?", "2", "3?", "4"],
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>\n⟧"
        "<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\n1?<|eot|><|head|>assistant<|/head|>\n\n⟦2<|eot|>⟧"
        "<|head|>user<|/head|>\n\n3?<|eot|><|head|>assistant<|/head|>\n\n⟦4<|eot|>⟧",
        "<s>[INST] 1?[/INST]⟦ 2</s>⟧[INST] 3?[/INST]⟦ 4</s>⟧",
    ),
    (  # an answer in two turns
        "uaa",
        ["Q", "A", "B"],
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>\n⟧<|im_start|>assistant\n⟦B<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nQ<|eot|><|head|>assistant<|/head|>\n\n⟦A<|eot|>⟧"
        "<|head|>assistant<|/head|>\n\n⟦B<|eot|>⟧",
        "<s>[INST] Q[/INST]⟦ A</s> B</s>⟧",
    ),
    (  # the last turn is a question
        "uau",
        ["Q", "A", "R"],
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>\n⟧<|im_start|>user\nR<|im_end|>\n",
        "<s><|head|>user<|/head|>\n\nQ<|eot|><|head|>assistant<|/head|>\n\n⟦A<|eot|>⟧<|head|>user<|/head|>\n\nR<|eot|>",
        "<s>[INST] Q[/INST]⟦ A</s>⟧[INST] R[/INST]",
    ),
    (  # characters of several bytes
        "ua",
        ["Tür?", "言葉"],
        "<|im_start|>user\nTür?<|im_end|>\n<|im_start|>assistant\n⟦言葉<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nTür?<|eot|><|head|>assistant<|/head|>\n\n⟦言葉<|eot|>⟧",
        "<s>[INST] Tür?[/INST]⟦ 言葉</s>⟧",
    ),
    (  # the question's words in the answer
        "ua",
        ["Yes", "Yes"],
        "<|im_start|>user\nYes<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nYes<|eot|><|head|>assistant<|/head|>\n\n⟦Yes<|eot|>⟧",
        "<s>[INST] Yes[/INST]⟦ Yes</s>⟧",
    ),
    (  # spaces and lines, which one style trims
        "ua",
        ["a\nb", " c\n"],
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n⟦ c\n<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\na\nb<|eot|><|head|>assistant<|/head|>\n\n⟦c<|eot|>⟧",
        "<s>[INST] a\nb[/INST]⟦  c\n</s>⟧",
    ),
    (  # an answer without words
        "ua",
        ["Q", ""],
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nQ<|eot|><|head|>assistant<|/head|>\n\n⟦<|eot|>⟧",
        "<s>[INST] Q[/INST]⟦ </s>⟧",
    ),
    (  # two questions before the answer
        "uua",
        ["Q", "R", "A"],
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>\n⟧",
        "<s><|head|>user<|/head|>\n\nQ<|eot|><|head|>user<|/head|>\n\nR<|eot|><|head|>assistant<|/head|>\n\n⟦A<|eot|>⟧",
        "<s>[INST] Q[/INST][INST] R[/INST]⟦ A</s>⟧",
    ),
]
ROLES = {"s": "system", "u": "user", "a": "assistant"}


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_counts_what_the_table_says(style: str, tmp_path: Path) -> None:
    model, expected = tmp_path / "model", [row[2 + list(STYLES).index(style)] for row in TABLE]
    model.mkdir()
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": STYLES[style]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for number, (roles, texts, *_) in enumerate(TABLE):
        talk = [{"role": ROLES[role], "content": text} for role, text in zip(roles, texts, strict=True)]
        (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 2)
        out = tmp_path / str(number)
        made = prepare_chat(tmp_path / "chat.jsonl", out, tokenizer=model, seq_len=SEQ_LEN, validation_fraction=0.5)
        assert (made.conversations, made.too_long, made.silent) == (2, 0, 0)
        assert marked(out) == expected[number], TABLE[number][:2]


def marked(folder: Path) -> str:
    """The first document of the first sequence, with marks around what is counted."""
    sequence = np.fromfile(folder / "train.bin", "<u4")[: SEQ_LEN + 1]
    document = np.split(sequence, np.flatnonzero(sequence[1:] & FIRST) + 1)[0]
    ids, counts = document & (UNCOUNTED - 1), document & (FIRST | UNCOUNTED) == 0
    tokenizer, text = load_tokenizer(folder), ""
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(counts)) + 1):
        spoken = tokenizer.decode(ids[run].tolist())
        text += f"⟦{spoken}⟧" if counts[run[0]] else spoken
    return text.replace("⟧⟦", "")
