"""The middle of repeated measurements and their spread."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Quartiles(NamedTuple):
    """A quarter, half and three quarters of the values lie below; on the line between neighbours."""

    first: float
    median: float
    third: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, method="inclusive"))
