"""Batches of token sequences. grain shuffles them; each process reads only its own rows of a global batch.

N is the number of tokens in a sequence; a row of a batch has N + 1 tokens.
"""

import itertools
import sys
from collections.abc import Sequence

import grain
import numpy as np
from numpy.typing import NDArray

from moe_jax.data.mixture import Mixture, SequenceIndex
from moe_jax.data.samples import Samples
from moe_jax.data.token_marks import mark_sources
from moe_jax.errors import DataError

Batches = grain.DatasetIterator[NDArray[np.int32]]

_THREADS = 2  # for prefetching: one computes indices while the other waits for the disk


def train_batches(
    sources: Sequence[Samples], mixture: Mixture, *, rows: Sequence[range], prefetch: int, marks_sources: bool = False
) -> Batches:
    """An infinite iterator of shuffled batches: int32 arrays [total length of `rows`, N + 1].

    `rows` are this process's rows of a global batch; `prefetch` batches are read ahead in the background. Every epoch
    of a source contains each of its samples once, in an order of its own; a batch may span two epochs. With
    `marks_sources` tokens are marked with their source (data/token_marks.py). Batch b depends only on (sources,
    mixture, b). The iterator's state, for `get_state()` and `set_state()`, is `{"next_index": b}`, so a run may resume
    with another number of processes.
    """
    orders = _orders(sources, mixture.seed)
    local = list(itertools.chain(*rows))

    def read(batch: int) -> NDArray[np.int32]:
        source_B, number_B = mixture.sequences(batch)
        token_BN1 = _read_sequences(sources, orders, SequenceIndex(source_B[local], number_B[local]))
        if marks_sources:
            mark_sources(token_BN1, source_B[local])
        return token_BN1

    batches = grain.MapDataset.range(sys.maxsize // mixture.batch_size).map(read)
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(batches.to_iter_dataset(options))


def check_next_batch(batches: grain.DatasetIterator[NDArray[np.int32]]) -> None:
    """Read the next batch without consuming it, so that damaged tokens are reported before a step is compiled.

    Raises DataError.
    """
    here = batches.get_state()
    next(batches)
    batches.set_state(here)


def batch_samples(sources: Sequence[Samples], mixture: Mixture, batch: int) -> list[tuple[int, int]]:
    """The source and the number of the sample in each row of batch number `batch`.

    Sample n begins at token n · N, or n · (N + 1) of packed samples.
    """
    orders, (source_B, number_B) = _orders(sources, mixture.seed), mixture.sequences(batch)
    rows = zip(source_B.tolist(), number_B.tolist(), strict=True)
    return [(source, int(orders[source][number])) for source, number in rows]


def _orders(sources: Sequence[Samples], seed: int) -> list[grain.MapDataset[int]]:
    """For each source, its sample numbers in all epochs, one epoch after another."""
    # grain adds the epoch to the seed. The seed is hashed first, so that seed 1 does not begin with seed 0's epoch 2.
    seeds = np.random.SeedSequence(seed).generate_state(len(sources))
    return [
        grain.MapDataset.range(len(samples)).shuffle(int(of_source)).repeat()
        for samples, of_source in zip(sources, seeds, strict=True)
    ]


def _read_sequences(
    sources: Sequence[Samples], orders: Sequence[grain.MapDataset[int]], index: SequenceIndex
) -> NDArray[np.int32]:
    """The tokens of B sequences of a mixture [B, N + 1]. Raises DataError."""
    out = np.empty((len(index.source_B), sources[0].seq_len + 1), np.int32)
    for source, (samples, order) in enumerate(zip(sources, orders, strict=True)):
        is_own_B = index.source_B == source
        out[is_own_B] = samples.read([order[number] for number in index.number_B[is_own_B].tolist()])
    return out


def validation_batches(
    samples: Samples, *, batch_size: int, num_batches: int, rows: Sequence[range]
) -> list[NDArray[np.int32]]:
    """Fixed validation batches: int32 arrays [total length of `rows`, N + 1], spread evenly over the samples.

    Every call returns the same ones. There are `num_batches`, or fewer if the samples do not fill that many without
    repetition. Raises DataError if they do not fill one.
    """
    num_batches = min(num_batches, len(samples) // batch_size)
    if num_batches == 0:
        of_source = f"{samples.name}: " if samples.name else ""
        raise DataError(
            f"{of_source}the validation text holds {len(samples)} sequences of data.seq_len={samples.seq_len} tokens, "
            f"fewer than one batch of train.batch_size={batch_size}: use a smaller train.batch_size or data.seq_len, "
            "or a larger data.validation_fraction (of a prepared folder: --validation-fraction)"
        )
    used = num_batches * batch_size
    local = list(itertools.chain(*rows))
    return [
        samples.read([(batch * batch_size + row) * len(samples) // used for row in local])
        for batch in range(num_batches)
    ]
