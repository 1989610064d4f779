"""Batches of token sequences: grain shuffles them, and each process reads its own rows of a global batch only.

N tokens in a sequence; a sample is N + 1 tokens, so that inputs and targets are its first and last N.
"""

import sys
from collections.abc import Sequence

import grain
import numpy as np
from numpy.typing import NDArray

from moe_jax.data.chunk_checksums import Chunks
from moe_jax.errors import DataError

Batches = grain.DatasetIterator[NDArray[np.int32]]

_THREADS = 2  # that read batches ahead: one computes indices while the other waits for the disk


def train_batches(
    tokens: NDArray[np.integer],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    rows: Sequence[range],
    prefetch: int,
    chunks: Chunks | None = None,
) -> Batches:
    """Shuffled batches for ever: int32 arrays [len of all `rows`, N + 1].

    `tokens` are 1-D; `rows` are this process's rows of a global batch of `batch_size`; `prefetch` batches are read
    ahead in the background. Every epoch holds each sample once, in an order of its own; a batch may span two epochs.
    With `chunks`, a sample with damaged tokens is replaced by the next that has none, and DataError raised if too many
    are damaged. Batch b depends on (tokens, seq_len, batch_size, seed, b) alone, and the iterator's `get_state()`,
    which `set_state()` takes back, is `{"next_index": b}`: any number of processes may go on from it.
    """
    tokens = np.asarray(tokens)  # slices of a memmap cost ten times those of an array
    order = _order(tokens, seq_len, seed)
    local = [row for part in rows for row in part]

    def read(batch: int) -> NDArray[np.int32]:
        samples = [order[batch * batch_size + row] for row in local]
        return _read_samples(tokens, samples, seq_len, chunks)

    batches = grain.MapDataset.range(sys.maxsize // batch_size).map(read)
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(batches.to_iter_dataset(options))


def check_next(batches: grain.DatasetIterator[NDArray[np.int32]]) -> None:
    """Read the batch that comes next, and still does: damaged tokens are told before a step is compiled."""
    here = batches.get_state()
    next(batches)
    batches.set_state(here)


def sample_numbers(tokens: NDArray[np.integer], seq_len: int, batch_size: int, seed: int, batch: int) -> list[int]:
    """Which samples are the rows of a batch: number n has the tokens from n · seq_len on."""
    order = _order(tokens, seq_len, seed)
    return [int(order[batch * batch_size + row]) for row in range(batch_size)]


def _order(tokens: NDArray[np.integer], seq_len: int, seed: int) -> grain.MapDataset[int]:
    """Samples of all epochs, one after another."""
    # grain adds the epoch to the seed: hashed first, so that seed 1 does not start with the second epoch of seed 0
    grain_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range((len(tokens) - 1) // seq_len).shuffle(grain_seed).repeat()


def validation_batches(
    tokens: NDArray[np.integer],
    *,
    seq_len: int,
    batch_size: int,
    num_batches: int,
    rows: Sequence[range],
    chunks: Chunks | None = None,
) -> list[NDArray[np.int32]]:
    """The same batches at each call: int32 arrays [len of all `rows`, N + 1], spread evenly over 1-D `tokens`.

    There are `num_batches`, or as many as the tokens fill without using one twice. Raises DataError if they do not
    fill one.
    """
    num_samples = (len(tokens) - 1) // seq_len
    num_batches = min(num_batches, num_samples // batch_size)
    if num_batches == 0:
        raise DataError(
            f"the validation text holds {num_samples} sequences of data.seq_len={seq_len} tokens, fewer than one batch "
            f"of train.batch_size={batch_size}: use a smaller train.batch_size or data.seq_len, "
            "or a larger data.validation_fraction (of a prepared folder: --validation-fraction)"
        )
    used = num_batches * batch_size
    local = [row for part in rows for row in part]
    batches = []
    for batch in range(num_batches):
        samples = [(batch * batch_size + row) * num_samples // used for row in local]
        batches.append(_read_samples(np.asarray(tokens), samples, seq_len, chunks))
    return batches


def _read_samples(
    tokens: NDArray[np.integer], samples: Sequence[int], seq_len: int, chunks: Chunks | None
) -> NDArray[np.int32]:
    out = np.empty((len(samples), seq_len + 1), np.int32)
    for row, sample in zip(out, samples, strict=True):
        start = sample * seq_len if chunks is None else _first_whole(chunks, sample, seq_len, len(tokens))
        row[:] = tokens[start : start + seq_len + 1]
    return out


def _first_whole(chunks: Chunks, sample: int, seq_len: int, num_tokens: int) -> int:
    """Where the first sample from this one on begins that is whole, around the end if need be. Raises DataError."""
    num_samples = (num_tokens - 1) // seq_len
    for other in range(sample, sample + num_samples):
        start = other % num_samples * seq_len
        if chunks.whole(start, start + seq_len + 1):
            return start
    raise DataError("no sequence is whole: data.damaged_chunks allows too much")
