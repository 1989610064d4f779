"""A mixture takes its share of each source, every sequence once, the same wherever and with whatever it resumes."""

import json
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_jax.config import DataConfig
from moe_jax.config.sections import DataSource
from moe_jax.data.loader import Batches, batch_samples, train_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.samples import Samples

BATCH, SEQ_LEN = 8, 3
SIZES = (50, 7, 20)  # samples of each source
SOURCES = [Samples(1000 * k + np.arange(size * SEQ_LEN + 1), SEQ_LEN) for k, size in enumerate(SIZES)]


def mixture(*sources: tuple[float, list[list[float]]], batch: int = BATCH, seed: int = 0) -> Mixture:
    made = [
        DataSource(path=str(k), weight=weight, weight_schedule=tuple(map(tuple, changes)))
        for k, (weight, changes) in enumerate(sources)
    ]
    return Mixture.of(DataConfig(path=None, sources=tuple(made)), batch, seed)


def start(rows: list[range] | None = None, prefetch: int = 0, seed: int = 0) -> Batches:
    mixed = mixture((0.7, []), (0.1, [[4, 0.5]]), (0.2, []), seed=seed)
    return train_batches(SOURCES, mixed, rows=rows or [range(BATCH)], prefetch=prefetch)


def counted(mixed: Mixture, batches: int) -> list[int]:
    """The sequences of each source, counted one by one."""
    rows = np.concatenate([mixed.sequences(batch).source_B for batch in range(batches)])
    return np.bincount(rows, minlength=len(mixed.changes[0][1])).tolist()


@pytest.mark.parametrize(
    "weights", [(0.5, 0.3, 0.2), (3, 1e-4, 7.77), (1, 0, 2), (0, 0, 1), (1 / 3, 1 / 3, 1 / 3), (9,)]
)
def test_counts_are_the_weights(weights: tuple[float, ...]) -> None:
    """To within 1 % of each after 100,000 sequences, and to (K - 1) / 2 sequences after any batch."""
    mixed = mixture(*((weight, []) for weight in weights), batch=100)
    shares = np.array(weights) / sum(weights)
    assert np.array(mixed.counts(1000)) == pytest.approx(1e5 * shares, rel=0.01, abs=1)
    for batches in (*range(1, 40), 10**9):
        assert sum(mixed.counts(batches)) == 100 * batches
        assert np.abs(mixed.counts(batches) - 100 * batches * shares).max() <= (len(weights) - 1) / 2 + 1e-4
    assert counted(mixed, 20) == mixed.counts(20)


def test_an_entry_that_changes_no_weight_changes_no_order() -> None:
    """A run resumes with it, also for a step that it has trained."""
    plain = mixture((0.7, [[6, 0.2]]), (0.3, []))
    named = mixture((0.7, [[1, 0.7], [3, 0.7], [6, 0.2], [7, 0.2]]), (0.3, [[4, 0.3]]))
    assert named.changes == plain.changes
    assert [named.counts(batches) for batches in range(12)] == [plain.counts(batches) for batches in range(12)]


def test_weights_change_in_the_step_that_is_named() -> None:
    mixed = mixture((1, [[3, 0], [6, 0.75]]), (0, [[3, 2], [6, 0.25]]))
    found = [counted_in(mixed, batch) for batch in range(7)]
    assert found == [[8, 0], [8, 0], [0, 8], [0, 8], [0, 8], [6, 2], [6, 2]]
    assert [mixed.weights_at(step) for step in (1, 2, 3, 5, 6)] == [(1, 0), (1, 0), (0, 2), (0, 2), (0.75, 0.25)]
    assert mixed.counts(7) == [28, 28] == counted(mixed, 7)
    assert mixed.counts(0) == [0, 0]


def counted_in(mixed: Mixture, batch: int) -> list[int]:
    return np.bincount(mixed.sequences(batch).source_B, minlength=2).tolist()


def test_a_later_change_leaves_earlier_batches_as_they_are() -> None:
    same, changed = mixture((2, []), (1, [])), mixture((2, []), (1, [[6, 9]]))
    for batch in range(5):
        np.testing.assert_array_equal(same.sequences(batch), changed.sequences(batch))
    assert counted(same, 6) != counted(changed, 6)


def test_every_sequence_of_a_source_comes_once_in_its_order() -> None:
    mixed = mixture((0.7, []), (0.1, [[4, 0.5]]), (0.2, []))
    indices = [mixed.sequences(batch) for batch in range(60)]
    source, number = (np.concatenate(each) for each in zip(*indices, strict=True))
    for k, count in enumerate(mixed.counts(60)):
        assert sorted(number[source == k]) == list(range(count))


def test_each_epoch_of_a_source_has_each_sample_once_in_another_order() -> None:
    mixed, samples = mixture((1, []), (1, []), (1, [])), dict[tuple[int, int], int]()
    for batch in range(60):
        rows = zip(*map(np.ndarray.tolist, mixed.sequences(batch)), strict=True)
        samples |= {row: number for row, (_, number) in zip(rows, batch_samples(SOURCES, mixed, batch), strict=True)}
    for source, size in enumerate(SIZES):
        count = mixed.counts(60)[source] // size * size
        epochs = np.array([samples[source, number] for number in range(count)]).reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len(set(map(tuple, epochs.tolist()))) >= min(len(epochs), 9)


def test_a_batch_has_the_tokens_of_its_samples() -> None:
    batches, mixed = start(), mixture((0.7, []), (0.1, [[4, 0.5]]), (0.2, []))
    for batch in range(9):
        rows = batch_samples(SOURCES, mixed, batch)
        expected = [1000 * source + SEQ_LEN * sample + np.arange(SEQ_LEN + 1) for source, sample in rows]
        np.testing.assert_array_equal(next(batches), expected)


def test_rows_of_a_source_are_at_random_places_that_the_seed_decides() -> None:
    mixed = [mixture((1, []), (1, []), batch=4, seed=seed) for seed in (0, 0, 1)]
    rows = np.array([[each.sequences(batch).source_B for batch in range(200)] for each in mixed])
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()
    assert (abs(rows.mean(axis=1) - 0.5) < 0.12).all(), "no row has always the same source"


def test_a_mixture_of_one_source_is_this_source() -> None:
    alone, mixed = Mixture.of(DataConfig(), BATCH, 5), mixture((3, []), seed=5)
    for batch in range(9):
        np.testing.assert_array_equal(alone.sequences(batch), mixed.sequences(batch))
    np.testing.assert_array_equal(alone.sequences(2).number_B, range(16, 24))


def test_a_run_killed_at_20_places_resumes_on_other_numbers_of_processes() -> None:
    """Each time all processes read the batches of the undisturbed run, bit for bit."""
    whole, choose = start(), random.Random(0)
    expected = [next(whole) for _ in range(60)]
    kills, done, state = sorted(choose.sample(range(1, 60), 20)), 0, None
    for kill in [*kills, 60]:
        processes = choose.choice([1, 2, 4, 8])
        own = BATCH // processes
        readers = [start([range(p * own, p * own + own)], choose.choice([0, 3])) for p in range(processes)]
        for reader in readers:
            if state is not None:
                reader.set_state(json.loads(state))
        read: list[NDArray[np.int32]] = []
        for _ in range(done, kill):
            read.append(np.concatenate([next(reader) for reader in readers]))
        np.testing.assert_array_equal(read, expected[done:kill])
        (state,) = {json.dumps(reader.get_state()) for reader in readers}
        done = kill


def test_the_order_of_a_mixture_is_that_of_earlier_versions() -> None:
    """A run may resume with a newer version, so these rows stay."""
    index = mixture((0.7, []), (0.3, []), seed=3).sequences(5)
    assert index.source_B.tolist() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert index.number_B.tolist() == [12, 32, 31, 30, 28, 13, 33, 29]
