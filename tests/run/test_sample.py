"""Text longer than a window: how much, and what each window of it sees."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_jax.config import Config, DataConfig, ExchangeConfig, MeshConfig, TrainConfig
from moe_jax.data.tokenizer import ByteTokenizer, load_model_tokenizer
from moe_jax.run import sample
from moe_jax.run.sample import continuation, encode_prompt, printable, sample_text, sample_tokens
from tests.data.tokenizer_kinds import KINDS, save
from tests.models.test_decode import MODEL, logits_of
from tests.small import first_params

LENGTH, COUNT = 8, 18
CONFIG = Config(model=MODEL, data=DataConfig(seq_len=LENGTH), train=TrainConfig(compute_dtype="float32"))


@pytest.fixture(scope="module")
def params():
    """Sharper than at the start, so that no two logits tie and every earlier token matters."""
    return jax.tree.map(lambda x: 3 * x, first_params(MODEL))


# In windows of 8, 3 tokens leave room for 5 more in the first one; of 8 or 11 the first one sees the last 4.
@pytest.mark.parametrize(("prompt_length", "first_start"), [(3, 0), (8, 4), (11, 7)])
def test_each_window_begins_with_the_second_half_of_the_one_before(prompt_length, first_start, params):
    prompt = np.random.default_rng(prompt_length).integers(0, MODEL.vocab_size, prompt_length, dtype=np.int32)
    new = sample_tokens(CONFIG, params, prompt, COUNT, temperature=0, seed=0)
    assert new.shape == (COUNT,)
    text = np.concatenate([prompt, new, np.zeros(LENGTH, np.int32)])
    end = prompt_length + COUNT
    starts = range(first_start, end - LENGTH // 2, LENGTH // 2)
    best = np.asarray(logits_of(params, np.stack([text[s : s + LENGTH] for s in starts]))).argmax(axis=-1)
    expected = {s + i + 1: best[w, i] for w, s in enumerate(starts) for i in range(LENGTH // 2 - 1, LENGTH - 1)}
    if first_start == 0:
        expected |= {i + 1: best[0, i] for i in range(prompt_length - 1, LENGTH - 1)}
    wanted = [expected[position] for position in range(prompt_length, end)]
    np.testing.assert_array_equal(new, wanted, err_msg="each token is the likeliest after those of its window")
    assert len(set(wanted)) > 3, "the text is too dull to show what a window sees"


def test_windows_draw_from_keys_of_their_own(params):
    """A key used again would repeat the draws of the window before: half of every window would come twice."""
    flat = jax.tree.map(lambda x: 0 * x, params)  # equal logits, so that the key alone decides
    config = dataclasses.replace(CONFIG, data=DataConfig(seq_len=32))
    prompt = np.zeros(32, np.int32)
    new = sample_tokens(config, flat, prompt, 64, temperature=1, seed=0).reshape(4, 16)
    assert len({tuple(window) for window in new.tolist()}) == 4
    np.testing.assert_array_equal(new.ravel(), sample_tokens(config, flat, prompt, 64, temperature=1, seed=0))


def test_a_model_of_other_devices_is_sampled_here():
    """Its run's kernels may be some that this device does not have, and its exchange one between nodes."""
    own = {"grouped_product": "pallas", "attention_kernel": "cudnn", "compute_dtype": "bfloat16"}
    model = dataclasses.replace(CONFIG.model, head_dim=8)
    nodes = {"mesh": MeshConfig(data=1, expert=4), "exchange": ExchangeConfig(algorithm="hier_2d", ranks_per_node=2)}
    there = dataclasses.replace(CONFIG, model=model, train=dataclasses.replace(CONFIG.train, **own), **nodes)
    own |= {"grouped_product": "auto", "attention_kernel": "auto"}
    here = dataclasses.replace(CONFIG, model=model, train=dataclasses.replace(there.train, **own))
    prompt, wide = np.array([3], np.int32), first_params(model)
    texts = [sample_tokens(config, wide, prompt, 3, temperature=0, seed=0) for config in (there, here)]
    np.testing.assert_array_equal(*texts)


def test_control_characters_are_not_shown() -> None:
    """A terminal would obey them."""
    assert printable("a\x1b[2Jb\r\n\tc\x00\x85é") == "a\ufffd[2Jb\n\tc\ufffd\ufffdé"


KNOWS_ALL = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab_size=1000))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_prompt_and_continuation_are_one_text(kind, tmp_path, monkeypatch):
    """The space between two words is there, and none within a word, whatever the tokenizer does to a first space."""
    tokenizer = load_model_tokenizer(save(KINDS[kind](), tmp_path))[1]
    known = tokenizer.encode("the quick")
    whole = tokenizer.encode("the quick brown fox")
    assert whole[: len(known)] == known
    letters = [tokenizer.number_of(letter) for letter in "ck"]
    assert None not in letters
    drawn = {"the quick": (whole[len(known) :], " brown fox"), "the qui": (letters, "ck"), "the qui ": (letters, "ck")}
    for prompt, (tokens, text) in drawn.items():
        monkeypatch.setattr(sample, "sample_tokens", lambda *_, drawn=tokens: np.array(drawn, np.int32))
        assert sample_text(KNOWS_ALL, None, tokenizer, prompt, len(tokens), 0.0, 0) == prompt + text


def test_a_prompt_begins_as_a_document_does(tmp_path):
    made = KINDS["llama"]()
    tokenizer = load_model_tokenizer(save(made, tmp_path))[1]
    tokens = encode_prompt(KNOWS_ALL, tokenizer, "the quick").tolist()
    assert tokens == made.encode("the quick").ids
    assert tokens[0] == made.token_to_id("<s>")


def test_a_long_prompt_is_whole(tmp_path):
    made = KINDS["byte_level"]()
    made.enable_truncation(max_length=4)
    made.enable_padding(length=90)
    tokenizer = load_model_tokenizer(save(made, tmp_path))[1]
    for prompt in ("a rogue", "a rogue and peasant slave " * 9):
        assert tokenizer.decode(encode_prompt(KNOWS_ALL, tokenizer, prompt).tolist()) == prompt


def test_bytes_that_continue_no_character_are_shown_as_such():
    assert continuation(ByteTokenizer(), list("é".encode()), [0xA9, 0x61]) == "\ufffda"
