"""A run on a mixture of sources: what it reads, validates on and records, and what it refuses."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_jax.checkpoint.compatibility import check_same_model, renamed_sources
from moe_jax.config import Config, DataConfig, LogConfig, OptimizerConfig
from moe_jax.config.sections import DataSource, ParameterGroup
from moe_jax.data.prepare import prepare_text
from moe_jax.data.sources import open_tokens
from moe_jax.data.token_marks import FIRST, num_targets, sources
from moe_jax.errors import CheckpointError, ConfigError, DataError
from moe_jax.run.describe import sources_text
from moe_jax.run.identity import Identity, check_text, identity_of
from moe_jax.run.model_tokenizer import check_tokens
from moe_jax.run.process_agreement import shared_settings
from moe_jax.run.setup import Run, open_run
from moe_jax.run.validation import loss_metrics
from tests.small import small_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: a prepared folder of upper-case documents, and a .txt file in lower case."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "upper.jsonl").write_text('{"text": "TO BE OR NOT"}\n' * 200)
    (folder / "lower.txt").write_text("to be, or not to be: that is the question. " * 60)
    prepare_text(folder / "upper.jsonl", folder / "upper")
    prepare_text(folder / "lower.txt", folder / "lower_tokens")
    return folder


def run_of(folder: Path, *names: str, **settings: Any) -> Run:
    weights = ((3.0, ()), (1.0, ((4.0, 3.0),)))
    sources = [
        DataSource(path=str(folder / name), weight=weight, weight_schedule=changes)
        for name, (weight, changes) in zip(names, weights, strict=False)
    ]
    data = DataConfig(path=None, seq_len=12, sources=tuple(sources), **settings)
    config = small_config(8, 1, model={"vocab_size": 256})
    return open_run(dataclasses.replace(config, data=data, log=LogConfig(dir=str(folder / "run"))))


def has_lower(batches: NDArray[np.int32]) -> NDArray[np.bool]:
    """Which sequences of batches have a letter in lower case; the end of a text is 255."""
    return ((batches >= ord("a")) & (batches <= ord("z"))).any(axis=2)


def test_a_run_reads_and_validates_each_source(folder: Path) -> None:
    run = run_of(folder, "upper", "lower.txt")
    marked = np.stack([next(run.batches) for _ in range(5)])
    is_lower = has_lower(marked & 255)
    np.testing.assert_array_equal(sources(marked)[..., 0], is_lower, "each token has the number of its source")
    assert is_lower.sum(axis=1).tolist() == [2, 2, 2, 4, 4], "of 8 rows, with another weight from step 4 on"
    assert run.source_metrics(3) == {
        "tokens/upper": 18 * 12,
        "epochs/upper": round(18 / len(run.sources[0]), 4),
        "tokens/lower": 6 * 12,
        "epochs/lower": round(6 / len(run.sources[1]), 4),
    }
    upper, lower = run.validation
    assert [has_lower(np.stack(each.batches)).all() for each in (upper, lower)] == [False, True]
    assert "upper 7" in sources_text(run) or "upper 5" in sources_text(run)
    assert sources_text(run).count("epochs") == 2


def test_documents_of_all_sources_are_marked(folder: Path) -> None:
    run = run_of(folder, "upper", "lower_tokens", mask_documents=True)
    (upper, lower), batch = run.validation, next(run.batches)
    assert upper.weights == [num_targets(each) for each in upper.batches] != lower.weights
    np.testing.assert_array_equal((batch[:, 1:] & FIRST) != 0, batch[:, :-1] & 255 == 255)


def test_a_source_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=rf"^data.sources\[1\].path={folder}/lower does not exist: did you mean "):
        run_of(folder, "upper", "lower")
    (folder / "short.txt").write_text("to be, or not to be: that is the question. " * 4)
    with pytest.raises(DataError, match=rf"^data.sources\[1\].path={folder}/short.txt: the validation text holds 1 s"):
        run_of(folder, "upper", "short.txt")


def test_sources_of_several_tokenizers_are_refused(folder: Path) -> None:
    for name, size in (("bpe", 260), ("other_bpe", 262), ("same_bpe", 260)):
        prepare_text(folder / "upper.jsonl", folder / name, tokenizer="bpe", vocab_size=size)

    def check(*names: str) -> None:
        sources = tuple(DataSource(path=str(folder / name), weight=1) for name in names)
        check_tokens(Config(data=DataConfig(path=None, sources=sources)), new=True)

    check("bpe", "same_bpe")
    check("upper", "lower.txt")
    cure = "prepare all sources with one tokenizer, e.g. by scripts/prepare_text.py TEXT FOLDER --tokenizer"
    with pytest.raises(ConfigError) as refusal:
        check("upper", "bpe")
    assert str(refusal.value) == (
        f"data.sources[1].path={folder}/bpe has tokens of its own tokenizer.json, and "
        f"data.sources[0].path={folder}/upper has bytes: {cure} bytes"
    )
    with pytest.raises(ConfigError, match=rf"of its own tokenizer.json: {cure} {folder}/bpe$"):
        check("bpe", "other_bpe")


def data_of(*sources: tuple[float, list[tuple[float, float]]]) -> DataConfig:
    made = [DataSource(path=f"s{k}", weight=w, weight_schedule=tuple(c)) for k, (w, c) in enumerate(sources)]
    return DataConfig(path=None, sources=tuple(made))


def test_a_run_resumes_with_the_weights_that_it_was_trained_with() -> None:
    """Later ones may change."""

    def resumed(here: DataConfig, there: DataConfig) -> str:
        saved = json.loads(json.dumps(dataclasses.asdict(Config(data=there))))
        try:
            check_same_model(Config(data=here), saved, Path("run"), step=30)
        except CheckpointError as error:
            return str(error)
        return ""

    two = data_of((1.0, []), (2.0, []))
    assert resumed(two, two) == resumed(data_of((1, [(31, 5)]), (2, [])), two) == ""
    assert resumed(data_of((7, [])), DataConfig()) == "", "the weight of one source has no effect"
    ending = "(a weight_schedule may change them from step 31 on), or another log.dir"
    assert resumed(data_of((1.0, [(30, 5.0)]), (2.0, [])), two) == (
        "data.sources has weights [5.0, 2.0] in step 30, but the checkpoints in log.dir=run were trained with "
        f"[1.0, 2.0]: use these weights {ending}"
    )
    assert ": list the sources in the same order, or use these weights (" in resumed(data_of((2, []), (1, [])), two)
    assert resumed(two, data_of((1.0, []), (3.0, []))).startswith("data.sources has weights [1.0, 2.0] in step 1, but ")
    assert resumed(two, DataConfig()) == (
        "data.sources has 2 sources, but the checkpoints in log.dir=run were trained on one source: use the same "
        "ones, or another log.dir"
    )


def test_another_name_of_a_source_is_reported() -> None:
    """Its tokens are compared by checksums: a name is free to change, and metrics then have both."""
    trained = json.loads(json.dumps(dataclasses.asdict(Config(data=data_of((1, []), (2, []))))))
    assert renamed_sources(Config(data=data_of((1, []), (2, []))), trained) == ""
    sources = (DataSource(path="s0", weight=1), DataSource(path="elsewhere/new.txt", weight=2))
    assert renamed_sources(Config(data=DataConfig(path=None, sources=sources)), trained) == (
        "data.sources[1] is new, and was s1: metrics of later steps have the new name (set its name to keep the old "
        "one)"
    )


def test_each_source_has_to_be_the_text_that_it_was(folder: Path) -> None:
    def identity(*names: str) -> tuple[Identity, DataConfig]:
        sources = tuple(DataSource(path=str(folder / name), weight=1) for name in names)
        data = DataConfig(path=None, sources=sources, seq_len=4)
        return identity_of(folder / "none", 0, open_tokens(data, 256)), data

    def resumed(now: tuple[str, ...], text: Mapping[str, Any] | None) -> str:
        own, data = identity(*now)
        return check_text(own, SimpleNamespace(step=3, text=text), Path("run"), data)  # type: ignore[arg-type]

    both = identity("upper", "lower.txt")[0].text
    assert resumed(("upper", "lower.txt"), both) == ""
    assert resumed(("upper",), identity("upper")[0].text) == ""
    assert identity("upper")[0].text.keys() == {"train", "validation"}, "as of a run on data.path"
    assert "lower.txt still has the tokens that it was trained on is not" in resumed(("upper", "lower.txt"), None)
    with pytest.raises(CheckpointError, match=rf"^data.sources\[0\].path={folder}/lower.txt has other tokens to train"):
        resumed(("lower.txt", "upper"), both)


def test_processes_compare_weights_and_not_paths() -> None:
    groups = OptimizerConfig(groups=(ParameterGroup(match="norm"),))
    settings = shared_settings(Config(data=data_of((1, []), (2, [(9, 3)])), optimizer=groups))
    assert {name: text for name, text in settings.items() if name.startswith("data.sources")} == {
        **{"data.sources[0].weight": "1", "data.sources[0].weight_schedule": "[]", "data.sources[0].name": "null"},
        **{"data.sources[1].weight": "2", "data.sources[1].weight_schedule": "[[9, 3]]"},
        "data.sources[1].name": "null",
    }
    assert settings["optimizer.groups[0].match"] == "norm"


def test_the_loss_of_a_run_is_the_mean_by_weights() -> None:
    found = loss_metrics([2.0, 4.0, float("nan")], [3, 1, 0], ["a", "b", "c"])
    assert found["validation_loss"] == 2.5
    assert list(found) == ["validation_loss", "validation_loss/a", "validation_loss/b", "validation_loss/c"]
    assert loss_metrics([2.0], [1], []) == {"validation_loss": 2.0}
