"""Batches of token sequences. grain shuffles them; each process reads only its own rows of a global batch.

N is the number of tokens in a sequence. A sample has N + 1 tokens: its first N are the inputs, its last N the targets.
"""

import itertools
import sys
from collections.abc import Sequence

import grain
import numpy as np
from numpy.typing import NDArray

from moe_jax.data.chunk_checksums import ChunkChecksums
from moe_jax.data.token_marks import mark_documents
from moe_jax.errors import DataError

Batches = grain.DatasetIterator[NDArray[np.int32]]

_THREADS = 2  # for prefetching: one computes indices while the other waits for the disk


def train_batches(
    tokens: NDArray[np.integer],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    rows: Sequence[range],
    prefetch: int,
    chunks: ChunkChecksums | None = None,
    end_of_text: int | None = None,
    is_packed: bool = False,
) -> Batches:
    """An infinite iterator of shuffled batches: int32 arrays [total length of `rows`, N + 1].

    `tokens` are 1-D; `rows` are this process's rows of a global batch of `batch_size`; `prefetch` batches are read
    ahead in the background. Every epoch contains each sample once, in an order of its own; a batch may span two epochs.
    With `chunks`, a sample with damaged tokens is replaced by the next intact one, and DataError is raised if too many
    chunks are damaged. With `end_of_text`, the token after each one is marked as the first of a document
    (data/token_marks.py). With `is_packed`, the tokens are samples of N + 1 tokens with marks. Batch b depends only on
    (tokens, seq_len, batch_size, seed, b). The iterator's state, for `get_state()` and `set_state()`, is
    `{"next_index": b}`, so a run may resume with another number of processes.
    """
    tokens = np.asarray(tokens)  # slicing a memmap costs ten times as much as slicing an array
    stride = _stride(seq_len, is_packed)
    order = _order(tokens, seq_len, stride, seed)
    local = list(itertools.chain(*rows))

    def read(batch: int) -> NDArray[np.int32]:
        samples = [order[batch * batch_size + row] for row in local]
        return _read_samples(tokens, samples, seq_len, stride, chunks, end_of_text)

    batches = grain.MapDataset.range(sys.maxsize // batch_size).map(read)
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(batches.to_iter_dataset(options))


def check_next_batch(batches: grain.DatasetIterator[NDArray[np.int32]]) -> None:
    """Read the next batch without consuming it, so that damaged tokens are reported before a step is compiled.

    Raises DataError.
    """
    here = batches.get_state()
    next(batches)
    batches.set_state(here)


def sample_indices(
    tokens: NDArray[np.integer], seq_len: int, batch_size: int, seed: int, batch: int, is_packed: bool = False
) -> list[int]:
    """The indices of the samples in the rows of batch number `batch`.

    Sample n begins at token n · seq_len, or n · (seq_len + 1) of packed samples.
    """
    order = _order(tokens, seq_len, _stride(seq_len, is_packed), seed)
    return [int(order[batch * batch_size + row]) for row in range(batch_size)]


def _stride(seq_len: int, is_packed: bool) -> int:
    """The number of tokens from the beginning of a sample to that of the next."""
    return seq_len + 1 if is_packed else seq_len


def _num_samples(num_tokens: int, seq_len: int, stride: int) -> int:
    return (num_tokens - seq_len - 1) // stride + 1


def _order(tokens: NDArray[np.integer], seq_len: int, stride: int, seed: int) -> grain.MapDataset[int]:
    """Sample indices of all epochs, one epoch after another."""
    # grain adds the epoch to the seed. The seed is hashed first, so that seed 1 does not begin with seed 0's epoch 2.
    grain_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range(_num_samples(len(tokens), seq_len, stride)).shuffle(grain_seed).repeat()


def validation_batches(
    tokens: NDArray[np.integer],
    *,
    seq_len: int,
    batch_size: int,
    num_batches: int,
    rows: Sequence[range],
    chunks: ChunkChecksums | None = None,
    end_of_text: int | None = None,
    is_packed: bool = False,
) -> list[NDArray[np.int32]]:
    """Fixed validation batches: int32 arrays [total length of `rows`, N + 1], spread evenly over the 1-D `tokens`.

    Every call returns the same ones, with marks as in `train_batches`. There are `num_batches`, or fewer if the tokens
    do not fill that many without repetition. Raises DataError if they do not fill one.
    """
    stride = _stride(seq_len, is_packed)
    num_samples = _num_samples(len(tokens), seq_len, stride)
    num_batches = min(num_batches, num_samples // batch_size)
    if num_batches == 0:
        raise DataError(
            f"the validation text holds {num_samples} sequences of data.seq_len={seq_len} tokens, fewer than one batch "
            f"of train.batch_size={batch_size}: use a smaller train.batch_size or data.seq_len, "
            "or a larger data.validation_fraction (of a prepared folder: --validation-fraction)"
        )
    used = num_batches * batch_size
    local = list(itertools.chain(*rows))
    batches = []
    for batch in range(num_batches):
        samples = [(batch * batch_size + row) * num_samples // used for row in local]
        batches.append(_read_samples(np.asarray(tokens), samples, seq_len, stride, chunks, end_of_text))
    return batches


def _read_samples(
    tokens: NDArray[np.integer],
    samples: Sequence[int],
    seq_len: int,
    stride: int,
    chunks: ChunkChecksums | None,
    end_of_text: int | None,
) -> NDArray[np.int32]:
    """The tokens of some samples [S, N + 1], damaged ones replaced if there are `chunks`. Raises DataError.

    With `end_of_text`, documents are marked.
    """
    out = np.empty((len(samples), seq_len + 1), np.int32)
    for row, sample in zip(out, samples, strict=True):
        start = sample * stride if chunks is None else _first_intact(chunks, sample, seq_len, stride, len(tokens))
        row[:] = tokens[start : start + seq_len + 1]
    if end_of_text is not None:
        mark_documents(out, end_of_text)
    return out


def _first_intact(chunks: ChunkChecksums, sample: int, seq_len: int, stride: int, num_tokens: int) -> int:
    """The first token of the first intact sample at or after `sample`, wrapping around at the end of the tokens.

    Raises DataError if no sample is intact.
    """
    num_samples = _num_samples(num_tokens, seq_len, stride)
    for other in range(sample, sample + num_samples):
        start = other % num_samples * stride
        if chunks.is_intact(start, start + seq_len + 1):
            return start
    raise DataError("no sequence is whole: data.damaged_chunks allows too much")
