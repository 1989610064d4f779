"""The median of repeated measurements, and their spread."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Quartiles(NamedTuple):
    """Quartiles of measured values, interpolated linearly between neighbours."""

    first: float
    median: float
    third: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Return the quartiles of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, method="inclusive"))
