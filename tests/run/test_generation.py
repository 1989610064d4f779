"""Batches of prompts: each is continued as if it were alone, and ends where it should."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from moe_jax.config import Config, DataConfig, TrainConfig
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.errors import DataError
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.model_tokenizer import end_tokens
from moe_jax.run.sampling_mesh import SamplingMesh
from moe_jax.run.text_generation import Prompt, TextGenerator, TextSettings, read_prompts
from tests.models.test_decode import MODEL
from tests.small import first_params

CONTEXT, COUNT = 8, 20
CONFIG = Config(
    model=dataclasses.replace(MODEL, vocab_size=256, num_layers=2),
    data=DataConfig(seq_len=CONTEXT),
    train=TrainConfig(compute_dtype="float32"),
)
WHERE = SamplingMesh.of(CONFIG)
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [5, 9, 2, 6, 5, 3]]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 3 * x, first_params(CONFIG.model))


@pytest.fixture(scope="module")
def decoder(params):
    return Decoder(WHERE, WHERE.placed(params), Sampling(1.0, top_k=20))


def continued(decoder: Decoder, prompts: list[list[int]], first: int = 0, ends: tuple[int, ...] = ()) -> Generation:
    generation = Generation.of(decoder, prompts, COUNT, seed=1, first=first, ends=ends)
    while not generation.is_done:
        generation.advance()
    return generation


def test_each_prompt_is_continued_as_if_it_were_alone(decoder):
    """Though their windows fill at different times."""
    together = continued(decoder, PROMPTS)
    assert [row.ended for row in together.rows] == ["length"] * 3
    for number, prompt in enumerate(PROMPTS):
        alone = continued(decoder, [prompt], first=number).rows[0]
        assert alone.new == together.rows[number].new
        assert len(alone.new) == COUNT
    assert len({tuple(row.new) for row in together.rows}) == 3
    assert 0 < together.first_token_s < together.seconds


def test_a_text_ends_at_an_end_token(decoder):
    whole = continued(decoder, PROMPTS).rows[1].new
    end = whole[9]
    row = continued(decoder, PROMPTS, ends=(end,)).rows[1]
    assert (row.new, row.ended) == (whole[: whole.index(end)], "end of text")


def test_prompts_of_a_file_are_continued_in_batches(params, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab"}\n\n{"prompt": "abc"}\n{"prompt": "b"}\n')
    prompts = read_prompts(tmp_path / "a.jsonl", False, None)

    generator = TextGenerator(
        CONFIG, Decoder(WHERE, WHERE.placed(params), Sampling()), ByteTokenizer(), TextSettings(Sampling(), 12)
    )

    def lines(*stops: str) -> list[dict[str, object]]:
        generator._settings = TextSettings(Sampling(), 12, stops=stops)  # with the same programs
        return list(generator.continued(prompts, 2))

    first = lines()
    assert [(line["prompt"], line["tokens"], line["ended"]) for line in first] == [
        ("ab", 12, "length"),
        ("abc", 12, "length"),
        ("b", 12, "length"),
    ]
    stop = first[2]["text"][3]
    stopped = lines(stop)[2]
    assert (stopped["text"], stopped["ended"]) == (first[2]["text"].partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("name", "content", "is_chat", "message"),
    [
        ("a.txt", "\n \n", False, "has no prompts: write one a line"),
        ("a.jsonl", "[1]\n", False, r"line 1 of --prompts=.* is \[1\]: write"),
        ("a.jsonl", '{"prompt": "a"}\n\n{', False, "line 3 of --prompts=.* is not JSON"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', False, "has messages: add --chat"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', True, "line 1 of"),
    ],
)
def test_a_file_that_has_no_prompts_is_refused(name, content, is_chat, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / name, is_chat, None)


def test_lines_are_prompts_or_questions(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt", False, None) == [Prompt("one"), Prompt("two")]
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}
    assert read_prompts(tmp_path / "a.txt", True, "Be brief.")[0].messages == [system, user]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_prompts(tmp_path / "b.txt", False, None) == [Prompt("one"), Prompt("two")]


CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n"
    "{% generation %}{{ message['content'] | trim }}{% endgeneration %}<|im_end|>\n"
    "{% if message.content == 'stop' %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("place", ["file", "settings", "list"])
def test_a_template_makes_the_text_of_a_chat(place, tmp_path):
    found = {"file": None, "settings": CHATML, "list": [{"name": "default", "template": CHATML}]}[place]
    if found is None:
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    settings = {"bos_token": {"content": "<s>"}, "chat_template": found}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate(tmp_path)
    text = template.render([{"role": "system", "content": " a "}, {"role": "user", "content": "b"}])
    assert text == "<s><|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match=r"refuses this conversation \(no tools\)"):
        template.render([{"role": "tool", "content": "b"}])


def test_templates_have_the_functions_that_transformers_gives_them(tmp_path):
    source = "{{ {'b': '<é>'} | tojson }}{{ ['é'] | tojson(ensure_ascii=True, indent=1) }}{{ strftime_now('%%') }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    assert ChatTemplate(tmp_path).render([]) == '{"b": "<é>"}[\n "\\u00e9"\n]%'


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{% for", "{{ messages.append(1) }}", "{{ 1 // 0 }}"]
)
def test_a_template_cannot_leave_its_sandbox(source, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(DataError, match=r"chat_template\.jinja fails"):
        ChatTemplate(tmp_path).render([{"role": "user", "content": "b"}])


def test_a_folder_without_a_template_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no chat_template\.jinja, and no chat_template in a tokenizer_config"):
        ChatTemplate(tmp_path)


def test_ends_are_those_of_the_tokenizer_and_of_the_model(tmp_path):
    assert end_tokens(tmp_path, ByteTokenizer()) == {0xFF}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert end_tokens(tmp_path, ByteTokenizer()) == {7, 9, 0xFF}


def test_the_number_of_programs_is_small(decoder):
    """Lengths are rounded up to powers of 2."""
    continued(decoder, [[1] * 6])
    before = len(decoder._programs)
    continued(decoder, [[1] * 5])
    assert len(decoder._programs) == before
    assert np.isfinite(decoder.compile_s)
