"""Whatever the number of processes and however often it is interrupted, training sees the same batches."""

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_jax.config import DataConfig
from moe_jax.data.loader import Batches, train_batches, validation_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.samples import Samples
from moe_jax.errors import DataError

SEQ_LEN, BATCH, SAMPLES = 5, 12, 50
TOKENS = np.arange(SAMPLES * SEQ_LEN + 3, dtype=np.uint16)  # each token is its position; two are left over
WHOLE = [range(BATCH)]


def read(
    num_batches: int,
    rows: list[range] = WHOLE,
    seed: int = 0,
    prefetch: int = 3,
    tokens: NDArray[np.integer] = TOKENS,
) -> NDArray[np.int32]:
    batches = start(rows, seed, prefetch, tokens)
    return np.stack([next(batches) for _ in range(num_batches)])


def start(rows: list[range], seed: int, prefetch: int, tokens: NDArray[np.integer] = TOKENS) -> Batches:
    mixture = Mixture.of(DataConfig(), BATCH, seed)
    return train_batches([Samples(tokens, SEQ_LEN)], mixture, rows=rows, prefetch=prefetch)


def sample_ids(batches: NDArray[np.int32]) -> NDArray[np.int32]:
    return batches[..., 0].reshape(-1) // SEQ_LEN


def test_a_sample_is_seq_len_plus_one_neighbouring_tokens() -> None:
    batches = read(5)
    assert batches.dtype == np.int32
    assert batches.shape == (5, BATCH, SEQ_LEN + 1)
    np.testing.assert_array_equal(batches - batches[..., :1], np.broadcast_to(np.arange(SEQ_LEN + 1), batches.shape))
    assert not np.any(batches[..., 0] % SEQ_LEN)


def test_every_epoch_holds_each_sample_once_also_when_batches_span_two_epochs() -> None:
    ids = sample_ids(read(25))  # 300 samples: 6 epochs of 50, and 50 is no multiple of 12
    for epoch in ids.reshape(6, SAMPLES):
        assert sorted(epoch) == list(range(SAMPLES))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    epochs = [tuple(ids) for seed in (0, 1, 2**40) for ids in sample_ids(read(25, seed=seed)).reshape(6, SAMPLES)]
    assert len(set(epochs)) == 18
    np.testing.assert_array_equal(read(4, seed=7), read(4, seed=7))


@pytest.mark.parametrize(
    "processes",
    [
        [[range(0, 12)]],
        [[range(0, 6)], [range(6, 12)]],
        [[range(0, 3)], [range(3, 6)], [range(6, 9)], [range(9, 12)]],
        [[range(0, 1), range(8, 12)], [range(1, 8)]],
        [[range(0, 2), range(6, 8)], [range(2, 6), range(8, 12)]],
    ],
)
def test_the_rows_of_all_processes_make_up_the_batch_of_one(processes: list[list[range]]) -> None:
    whole = read(6)
    for rows in processes:
        local = [row for part in rows for row in part]
        np.testing.assert_array_equal(read(6, rows), whole[:, local])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_run_of_four_processes_resumes_with_two(prefetch: int) -> None:
    whole = read(12)

    states = set()
    for process in range(4):
        batches = start([range(3 * process, 3 * process + 3)], 0, prefetch)
        for _ in range(5):
            next(batches)
        states.add(json.dumps(batches.get_state()))
    (state,) = states  # it is the same on every process
    for process in range(2):
        rows = range(6 * process, 6 * process + 6)
        batches = start([rows], 0, prefetch)
        next(batches)  # an iterator in use can be set back too
        batches.set_state(json.loads(state))
        np.testing.assert_array_equal([next(batches) for _ in range(7)], whole[5:, rows])


def test_a_process_reads_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TOKENS.copy()  # readers of other tests may still read ahead
    read_ids = record_reads(monkeypatch, tokens)
    batches = read(3, [range(4, 6)], prefetch=0, tokens=tokens)
    assert read_ids == sample_ids(batches).tolist()


def test_batches_are_read_ahead_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TOKENS.copy()  # readers of other tests may still read ahead
    read_ids = record_reads(monkeypatch, tokens)
    batches = start(WHOLE, 0, 4, tokens)
    next(batches)
    deadline = time.monotonic() + 10
    while len(read_ids) < 5 * BATCH and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(read_ids) == 5 * BATCH


def record_reads(monkeypatch: pytest.MonkeyPatch, tokens: NDArray[np.integer] = TOKENS) -> list[int]:
    """The ids of all samples of these tokens that are read from now on."""
    ids: list[int] = []
    original = Samples.read

    def recording(samples: Samples, numbers: Sequence[int]) -> NDArray[np.int32]:
        ids.extend(numbers if samples.tokens is tokens else [])
        return original(samples, numbers)

    monkeypatch.setattr(Samples, "read", recording)
    return ids


def validate(num_batches: int, batch_size: int = 7, rows: list[range] | None = None) -> list[NDArray[np.int32]]:
    rows = rows or [range(batch_size)]
    samples = Samples(TOKENS, SEQ_LEN)
    return validation_batches(samples, batch_size=batch_size, num_batches=num_batches, rows=rows)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (3, 3), (7, 7), (8, 7), (100, 7)])
def test_validation_counts_no_sequence_twice_and_covers_the_whole_text(asked: int, given: int) -> None:
    batches = validate(asked)
    assert len(batches) == given
    ids = sample_ids(np.stack(batches))
    assert len(set(ids)) == given * 7
    gaps = np.diff([*ids, SAMPLES])
    assert ids[0] == 0
    assert gaps.max() - gaps.min() <= 1
    np.testing.assert_array_equal(batches, validate(asked))


def test_the_validation_rows_of_all_processes_make_up_the_batch_of_one() -> None:
    parts = [validate(3, rows=rows) for rows in ([range(0, 2), range(6, 7)], [range(2, 6)])]
    together = np.concatenate([np.stack(part) for part in parts], axis=1)
    np.testing.assert_array_equal(together[:, np.argsort([0, 1, 6, 2, 3, 4, 5])], validate(3))


def test_a_validation_text_of_less_than_one_batch_is_refused() -> None:
    with pytest.raises(DataError) as error:
        validate(1, batch_size=SAMPLES + 1)
    assert str(error.value) == (
        "the validation text holds 50 sequences of data.seq_len=5 tokens, fewer than one batch of train.batch_size=51: "
        "use a smaller train.batch_size or data.seq_len, or a larger data.validation_fraction "
        "(of a prepared folder: --validation-fraction)"
    )
