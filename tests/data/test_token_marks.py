"""Marks on tokens: which document a token is of, and which targets the loss counts."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from moe_jax.config import DataConfig, LogConfig
from moe_jax.config.sections import MOST_MARKED_SOURCES
from moe_jax.data.loader import train_batches, validation_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.prepare import prepare_text
from moe_jax.data.samples import Samples
from moe_jax.data.token_marks import (
    FIRST,
    UNCOUNTED,
    counted,
    documents,
    indices,
    mark_documents,
    mark_sources,
    num_targets,
    sources,
)
from moe_jax.run.setup import open_run
from tests.small import small_config

END = 9
TOKENS = np.array([4, 5, END, 6, END, END, 7, 8, 1, 2, 3, END, 4])


def test_documents_begin_after_the_end_of_a_text() -> None:
    batch = TOKENS[None, :].astype(np.int32)
    mark_documents(batch, END)
    marked = jnp.asarray(batch)
    np.testing.assert_array_equal(indices(marked)[0], TOKENS)
    np.testing.assert_array_equal(documents(marked)[0], [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4])
    # each token but the last has a target: its document's end counts, another document's first token does not
    np.testing.assert_array_equal(counted(marked[:, 1:])[0], [1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0])
    assert num_targets(batch) == 8


def test_a_document_that_begins_with_the_end_of_a_text_keeps_its_beginning() -> None:
    """Of tokenizers with one token for both."""
    batch = np.array([[END, 4, 5, END, END, 6, END, END, END, END, 7]], np.int32)
    mark_documents(batch, END, begins_with_end=True)
    marked = jnp.asarray(batch)
    np.testing.assert_array_equal(documents(marked)[0], [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4])
    np.testing.assert_array_equal(counted(marked[:, 1:])[0], [1, 1, 1, 0, 1, 1, 0, 0, 0, 1])


def test_an_end_with_a_mark_is_an_end() -> None:
    batch = np.array([[END | UNCOUNTED, 1 | UNCOUNTED, END, 2, 3]], np.int32)
    mark_documents(batch, END)
    np.testing.assert_array_equal(documents(jnp.asarray(batch))[0], [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(counted(jnp.asarray(batch))[0], [0, 0, 1, 0, 1])


def test_a_run_marks_the_documents_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "to be"}\n' * 250)
    prepare_text(tmp_path / "lines.jsonl", tmp_path / "tokens")
    for is_masked in (False, True):
        settings = DataConfig(path=str(tmp_path / "tokens"), seq_len=12, mask_documents=is_masked)
        log = LogConfig(dir=str(tmp_path / "run"))
        config = dataclasses.replace(small_config(8, 1, model={"vocab_size": 256}), data=settings, log=log)
        run = open_run(config)
        (validation,) = run.validation
        assert validation.weights == ([num_targets(validation.batches[0])] if is_masked else [1])
        for batch in (next(run.batches), validation.batches[0]):
            assert bool((batch & FIRST).any()) == is_masked
            np.testing.assert_array_equal((batch[:, 1:] & FIRST) != 0, is_masked & (batch[:, :-1] & 255 == 255))


def test_the_largest_vocabulary_leaves_room_for_marks() -> None:
    largest = np.full((2, 1), 2**24 - 1, np.int32)
    marked = largest | FIRST | UNCOUNTED
    mark_sources(marked, np.array([0, MOST_MARKED_SOURCES - 1]))
    assert (indices(marked) == largest).all()
    assert sources(marked).ravel().tolist() == [0, 31]
    assert not counted(marked).any()
    mark_sources(largest, np.array([0, 31]))
    assert counted(largest).all()
    assert not documents(largest).any()


def test_batches_are_marked_where_the_end_is_named() -> None:
    rows = [range(3)]
    plain, marked = (
        [
            next(train_batches([samples], Mixture.of(DataConfig(), 3, 0), prefetch=0, rows=rows)),
            validation_batches(samples, batch_size=3, num_batches=1, rows=rows)[0],
        ]
        for samples in (Samples(TOKENS, 4), Samples(TOKENS, 4, end_of_text=END))
    )
    for without, batch in zip(plain, marked, strict=True):
        assert (without < 10).all()
        np.testing.assert_array_equal(batch[:, 0], without[:, 0])
        np.testing.assert_array_equal(batch[:, 1:] == without[:, 1:] | FIRST, without[:, :-1] == END)
