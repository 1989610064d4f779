"""The model of lm-eval's interface against single forward passes: one sequence, one window, no cache, no batches."""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from moe_jax.config import Config, DataConfig, TrainConfig
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.tokenizer import ByteTokenizer
from moe_jax.errors import ConfigError
from moe_jax.run import harness_model
from moe_jax.run.harness import TaskResult, load_tasks, run_tasks
from moe_jax.run.harness_model import HarnessModel, spans_of
from moe_jax.run.sampling_mesh import SamplingMesh
from tests.models.test_decode import MODEL, logits_of
from tests.small import first_params

CONTEXT = 16
CONFIG = Config(
    model=dataclasses.replace(MODEL, vocab_size=256),
    data=DataConfig(seq_len=CONTEXT),
    train=TrainConfig(compute_dtype="float32"),
)
WHERE = SamplingMesh.of(CONFIG)
END = ByteTokenizer.end_of_text


@pytest.fixture(scope="module")
def params() -> Any:
    """Sharper than at the start, so that each earlier token matters."""
    return jax.tree.map(lambda x: 3 * x, first_params(CONFIG.model))


@pytest.fixture(scope="module")
def model(params: Any) -> HarnessModel:
    return HarnessModel(CONFIG, WHERE, WHERE.placed(params), ByteTokenizer(), frozenset({END}), batch_size=3)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def log_probs_after(params: Any, before: list[int]) -> np.ndarray:
    """Those of each token after some, by one whole forward pass, padded to one length."""
    padded = np.array([before + [0] * (CONTEXT - len(before))], np.int32)
    logits = np.asarray(logits_of(params, padded, CONFIG.model), np.float64)[0, len(before) - 1]
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def score(params: Any, before: list[int], after: list[int]) -> tuple[float, bool]:
    total, is_greedy = 0.0, True
    for token in after:
        log_prob = log_probs_after(params, before[-CONTEXT:])
        total, is_greedy = total + log_prob[token], is_greedy and log_prob.argmax() == token
        before = [*before, token]
    return total, bool(is_greedy)


def test_a_continuation_has_the_probability_of_its_tokens(model: HarnessModel, params: Any) -> None:
    """Contexts of several lengths, which are of different programs; spaces between both; greedy ones."""
    likeliest = {text: int(log_probs_after(params, list(text.encode())).argmax()) for text in "abcdefgh"}
    before, greedy = next((text, token) for text, token in likeliest.items() if token < 128)
    pairs = [("to be", " or not"), ("to be ", "or not"), ("", "a"), ("x", ""), (before, chr(greedy)), ("q", "ue")]
    found = model.loglikelihood(requests(*pairs))
    tokens = [(list(b"to be"), list(b" or not"))] * 2 + [([END], list(b"a")), ([], [])]
    tokens += [(list(before.encode()), [greedy]), (list(b"q"), list(b"ue"))]
    for (log_prob, is_greedy), (context, continuation) in zip(found, tokens, strict=True):
        expected, expected_greedy = score(params, context, continuation)
        assert log_prob == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert is_greedy == expected_greedy
    assert [each.is_greedy for each in found] == [False, False, False, True, True, False]
    assert found[0] == found[1], "a space at the end of a context belongs to the continuation"


def test_a_long_context_loses_its_beginning(
    model: HarnessModel, params: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    context, continuation = "the quick brown fox jumps", " over"
    ((log_prob, _),) = model.loglikelihood(requests((context, continuation)))
    assert capsys.readouterr().err == (
        "warning: 1 of 1 contexts lose their beginning, as there is room for 17 tokens: use fewer examples "
        "(--fewshot), or another task\n"
    )
    whole = list(f"{context}{continuation}".encode())[-(CONTEXT + 1) :]
    assert log_prob == pytest.approx(score(params, whole[:-5], whole[-5:])[0], rel=1e-4)
    with pytest.raises(ConfigError, match=r"^a continuation of 17 tokens is longer than data.seq_len=16: set data.seq"):
        model.loglikelihood(requests(("a", "b" * 17)))


@pytest.mark.parametrize("length", [1, CONTEXT, CONTEXT + 1, 2 * CONTEXT + 5])
def test_each_token_of_a_text_is_predicted_once_in_its_window(length: int, model: HarnessModel, params: Any) -> None:
    text = "that is the question whether tis nobler in the mind"[:length]
    tokens = list(text.encode())
    expected = 0.0
    for number, token in enumerate(tokens):
        window_end = min((number // CONTEXT + 1) * CONTEXT, length)  # of the text, exclusive
        before = [END, *tokens][max(0, window_end - CONTEXT) : number + 1]
        expected += log_probs_after(params, before)[token]
    # what comes after a text in the same batch does not matter
    found = model.loglikelihood_rolling(requests((text,), ("another text, longer than any of the other ones here",)))
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert sum(span.predicted for span in spans_of(tokens, END, CONTEXT)) == length


def test_windows_are_those_of_the_interface() -> None:
    """The example in the definition of lm-eval's `loglikelihood_rolling`."""
    found = [(list(tokens), predicted) for tokens, predicted in spans_of(range(10), -1, 4)]
    assert found == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert list(spans_of([], -1, 4)) == []


def test_generated_text_is_the_greedy_one_up_to_a_stop(model: HarnessModel, params: Any) -> None:
    contexts, count = ["to be", "or", "a context that is longer than there is room for"], 6

    def greedy(context: str) -> str:
        tokens = list(context.encode())[-(CONTEXT - count) :]
        new: list[int] = []
        while len(new) < count and (token := int(log_probs_after(params, tokens + new).argmax())) != END:
            new.append(token)
        return bytes(new).decode(errors="replace")

    expected = [greedy(context) for context in contexts]
    assert len(set(expected)) > 1
    assert model.generate_until(requests(*((each, {"max_gen_toks": count}) for each in contexts))) == expected
    stop = expected[0][2]
    options = {"until": [stop], "max_gen_toks": count, "do_sample": False, "temperature": 0.7}
    assert model.generate_until(requests((contexts[0], options))) == [expected[0].partition(stop)[0]]
    drawn = {"max_gen_toks": count, "do_sample": True, "temperature": 50.0, "top_k": 200}
    first, again = (model.generate_until(requests((contexts[0], drawn)))[0] for _ in range(2))
    assert first == again != expected[0], "a seed determines what is drawn"
    with pytest.raises(
        ConfigError, match=r"^generation_kwargs of a task has num_beams=4, which is not known here: use "
    ):
        model.generate_until(requests(("a", {"num_beams": 4})))


@pytest.mark.parametrize(("count", "room"), [(3, 13), (8, 8), (CONTEXT, 8), (256, 8)])
def test_a_context_keeps_half_of_the_window_however_many_tokens_a_task_asks_for(
    count: int, room: int, model: HarnessModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[list[int]] = []

    def texts_after(self: object, prompts: list[list[int]], batch_size: int) -> list[str]:
        given.extend(prompts)
        return [""] * len(prompts)

    monkeypatch.setattr(harness_model.TextGenerator, "texts_after", texts_after)
    contexts = ["a question that is longer than the window", "short", "12345678"]
    model.generate_until(requests(*((each, {"max_gen_toks": count}) for each in contexts)))
    assert given == [list(each.encode())[-room:] for each in (contexts[0], contexts[2], contexts[1])]
    assert f"warning: 1 of 3 contexts lose their beginning, as there is room for {room} tok" in capsys.readouterr().err


class FakeManager:
    """As lm-eval's."""

    def __init__(self, include_path: str | None, include_defaults: bool = True) -> None:
        self.all_tasks = ["own"] if include_path else []
        self.all_tasks += ["arc"] if include_defaults else []

    def load(self, names: list[str]) -> None:
        if "arc" in names:
            raise ConnectionError("no route\nto the hub")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with the parts of lm-eval that are used, which is not installed for tests."""
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval.tasks"].TaskManager = FakeManager  # type: ignore[attr-defined]
    modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["lm_eval"]


def test_tasks_that_cannot_be_loaded_are_reported(harness: ModuleType, tmp_path: Path) -> None:
    assert load_tasks(["own"], tmp_path).all_tasks == ["own"], "lm-eval's own are not indexed without need"
    for names, folder, message in (
        (
            ["arc"],
            None,
            "--tasks=arc cannot be loaded (ConnectionError: no route to the hub): repair the task, or use ",
        ),
        (["own", "nope"], tmp_path, f"--tasks=nope is no task of lm-eval nor of --task-folder={tmp_path}: use one "),
        (["own"], tmp_path / "no", f"--task-folder={tmp_path}/no is not a folder: name one with the YAML files"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_tasks(names, folder)
        assert str(refused.value).startswith(message)


def test_results_of_tasks_are_their_numbers(harness: ModuleType, model: HarnessModel) -> None:
    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        (found,) = arguments["model"].loglikelihood(requests(("to be", " or")))
        assert isinstance(found, tuple)
        metrics = {"alias": "own", "acc,none": found[0], "acc_stderr,none": "N/A", "f1,strict": 1, "sample_len": 3}
        return {"results": {"own": metrics}}

    harness.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    ((expected, _),) = model.loglikelihood(requests(("to be", " or")))
    found = run_tasks(None, ["own"], model, None, None)
    assert found == [TaskResult("own", {"acc": expected, "f1:strict": 1.0})]


class BpeLike(ByteTokenizer):
    """A tokenizer of bytes with a special token `<s>`, which begins each document."""

    begin_of_text = [1]  # noqa: RUF012 – the protocol's

    def encode_markup(self, text: str) -> list[int]:
        return [token for part in re.split("(<s>)", text) for token in ([1] if part == "<s>" else self.encode(part))]


@pytest.fixture
def chat(params: Any, tmp_path: Path) -> HarnessModel:
    (tmp_path / "chat_template.jinja").write_text(
        "<s>{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    template = ChatTemplate(tmp_path)
    return HarnessModel(
        CONFIG, WHERE, WHERE.placed(params), BpeLike(), frozenset({END}), batch_size=3, template=template
    )


def test_a_context_of_a_chat_has_special_tokens_and_none_twice(chat: HarnessModel, params: Any) -> None:
    context = chat.rendered([{"role": "user", "content": "hey"}])
    assert context == "<s>u:hey;a:"
    (found,) = chat.loglikelihood(requests((context, "no")))
    np.testing.assert_allclose(found[0], score(params, [1, *b"u:hey;a:"], [*b"no"])[0], rtol=1e-4)
    (rolling,) = chat.loglikelihood_rolling(requests(("<s>a",)))
    np.testing.assert_allclose(rolling, score(params, [1], [*b"<s>a"])[0], rtol=1e-4)
    plain = HarnessModel(CONFIG, WHERE, WHERE.placed(params), BpeLike(), frozenset({END}), batch_size=3)
    options = {"until": [";"], "max_gen_toks": 3}
    assert chat.generate_until(requests((context, options))) == plain.generate_until(requests(("u:hey;a:", options)))


def test_an_answer_that_is_begun_is_continued(chat: HarnessModel) -> None:
    messages = [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "he "}]
    assert chat.rendered(messages, add_generation_prompt=False) == "<s>u:hey;a:he"


def test_tasks_of_a_chat_are_conversations(harness: ModuleType, chat: HarnessModel, model: HarnessModel) -> None:
    given: list[dict[str, Any]] = []

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        given.append(arguments)
        return {"results": {}}

    harness.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    for each in (chat, model):
        run_tasks(None, ["own"], each, None, None)
    of_chat, plain = given
    assert of_chat["apply_chat_template"]
    assert of_chat["fewshot_as_multiturn"]
    assert "apply_chat_template" not in plain
    own = of_chat["model"]
    assert own.apply_chat_template([{"role": "user", "content": "hey"}]) == "<s>u:hey;a:"
    assert own.chat_template(True).startswith("<s>{% for")
    assert own.tokenizer_name == "run"
    assert plain["model"].chat_template(True) == ""
