"""A weighted mixture of sources: which sequence of which source each row of a batch has, by arithmetic alone.

The number of sequences of each source in the first n batches is a function of n and the weights, so nothing has to be
counted or stored to resume at any batch. In the notation of the code, K sources and B sequences in a batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import DataConfig


class SequenceIndex(NamedTuple):
    """For each row of a batch, its source, and the number of its sequence in the infinite order of this source."""

    source_B: NDArray[np.int64]
    number_B: NDArray[np.int64]  # that many sequences of this source come before it


@dataclass(frozen=True)
class Mixture:
    """The order in which batches take sequences from K sources.

    Until the weights change, the number of sequences of each source is its share of all sequences since the last
    change, to within (K - 1) / 2: rounding errors do not add up. Each batch has its sequences in a random order, which
    depends on (seed, batch) alone, so that no device always has the same source.
    """

    changes: tuple[tuple[int, tuple[float, ...]], ...]  # the first batch of each period, from 0, and its K weights
    batch_size: int
    seed: int

    @classmethod
    def of(cls, data: DataConfig, batch_size: int, seed: int) -> "Mixture":
        """Return the mixture of a config. Step s, counted from 1, has batch s - 1."""
        changes = ((step - 1, tuple(source.weight_at(step) for source in data.mixture)) for step in data.weight_steps)
        return cls(tuple(changes), batch_size, seed)

    def counts(self, batches: int) -> list[int]:
        """Return the number of sequences of each source in the first `batches` batches."""
        ends = [first for first, _ in self.changes[1:]] + [batches]
        periods = [
            _apportioned(parts, self.batch_size * (min(end, batches) - first))
            for (first, _), parts, end in zip(self.changes, self._parts, ends, strict=True)
            if first < batches
        ]
        return [sum(of_source) for of_source in zip(*periods, strict=True)] or [0] * len(self.changes[0][1])

    def sequences(self, batch: int) -> SequenceIndex:
        """Return the indices of the B sequences of a batch, which is numbered from 0."""
        spans = list(zip(self.counts(batch), self.counts(batch + 1), strict=True))
        source_B = np.repeat(np.arange(len(spans)), [end - first for first, end in spans])
        number_B = np.concatenate([np.arange(first, end) for first, end in spans])
        if len(spans) == 1:
            return SequenceIndex(source_B, number_B)
        # raw random numbers, whose stream numpy keeps in all versions, unlike that of Generator.permutation
        bits = np.random.Philox(np.random.SeedSequence((self.seed, batch))).random_raw(self.batch_size)
        order = np.argsort(bits, kind="stable")
        return SequenceIndex(source_B[order], number_B[order])

    def weights_at(self, step: int) -> tuple[float, ...]:
        """Return the weights of the sources in a step, counted from 1."""
        return next(weights for first, weights in reversed(self.changes) if first < step)

    @cached_property
    def _parts(self) -> list[list[Fraction]]:
        """For each period and source, its weight as a part of its own and those of all later sources."""
        return [_parts_of(weights) for _, weights in self.changes]


def _parts_of(weights: Sequence[float]) -> list[Fraction]:
    exact = [Fraction(weight) for weight in weights]
    rest = list(itertools.accumulate(reversed(exact)))[::-1]
    return [own / left if left else Fraction(0) for own, left in zip(exact, rest, strict=True)]


def _apportioned(parts: Sequence[Fraction], total: int) -> list[int]:
    """Split `total` sequences: each source takes its part, rounded, of what earlier ones have left.

    Each count grows with the total, by at most one when the total does by one, as the part of a number does and the
    rest too. So a longer run has all sequences of a shorter one.
    """
    counts = []
    for part in parts:
        taken = (2 * total * part.numerator + part.denominator) // (2 * part.denominator)
        counts.append(taken)
        total -= taken
    return counts
