"""Measured times of growing amounts: interpolation, extrapolation, and an alpha-beta fit."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_jax.plan.task_times import Linear


@dataclass(frozen=True)
class Fit:
    """An alpha-beta model of measured times, and the share of their variation that it explains."""

    line: Linear
    r_squared: float  # 1: all of it


def fit_linear(amounts: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Alpha and beta, both at least 0, that minimise the sum of squared *relative* errors.

    With weights 1/t² a kilobyte counts as much as a megabyte; without them, the largest amounts alone would decide. The
    same weights are in r² = 1 − Σw(t − t̂)² / Σw(t − t̄)², where t̂ is the fitted time and t̄ the weighted mean. Raises
    ValueError for fewer than two amounts, or times that are not above 0.
    """
    if len(set(amounts)) < 2 or min(seconds) <= 0:
        raise ValueError("a line needs times above 0 of two different amounts")
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_x, mean_t = (sum(w * v for w, v in zip(weights, row, strict=True)) / total for row in (amounts, seconds))
    points = list(zip(weights, amounts, seconds, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in points)
    beta = slope / sum(w * (x - mean_x) ** 2 for w, x, _ in points)
    line = Linear(mean_t - beta * mean_x, beta)
    if line.beta_s < 0:
        line = Linear(mean_t, 0.0)
    elif line.alpha_s < 0:
        line = Linear(0.0, sum(w * x * t for w, x, t in points) / sum(w * x**2 for w, x, _ in points))
    unexplained = sum(w * (t - line.seconds(x)) ** 2 for w, x, t in points)
    variation = sum(w * (t - mean_t) ** 2 for w, _, t in points)
    return Fit(line, 1 - unexplained / variation if variation else 1.0)


def label(name: str, settings: Mapping[str, int]) -> str:
    """Name and settings of an operation in one line."""
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of one operation at growing amounts: medians and quartiles of repeated runs."""

    name: str  # all_to_all.flat, all_gather, matmul, …
    settings: dict[str, int] = field(hash=False)  # ranks and stride of a group; widths; head_dim
    unit: Literal["bytes", "flops"]
    amounts: tuple[float, ...]  # in ascending order
    median_s: tuple[float, ...]
    first_quartile_s: tuple[float, ...]
    third_quartile_s: tuple[float, ...]
    alpha_s: float
    beta_s: float  # per byte or flop
    r_squared: float
    efficiency: tuple[float, ...]  # bytes or flops per second, relative to the best of the curve

    @property
    def label(self) -> str:
        """Name and settings in one line."""
        return label(self.name, self.settings)

    @property
    def line(self) -> Linear:
        """The alpha-beta model."""
        return Linear(self.alpha_s, self.beta_s)

    def seconds(self, amount: float) -> float:
        """Seconds of an amount.

        Between two measured amounts they are interpolated linearly; beyond, they grow with the model from the last
        amount.
        """
        edge = 0 if amount <= self.amounts[0] else -1 if amount >= self.amounts[-1] else None
        if edge is not None:
            modelled_s = self.line.seconds(self.amounts[edge])
            return self.median_s[edge] * (self.line.seconds(amount) / modelled_s if modelled_s else 1.0)
        right = bisect.bisect_left(self.amounts, amount)
        low, high = self.amounts[right - 1 : right + 1]
        share = (amount - low) / (high - low)
        return (1 - share) * self.median_s[right - 1] + share * self.median_s[right]


def curve(
    name: str,
    settings: dict[str, int],
    unit: Literal["bytes", "flops"],
    amounts: Sequence[float],
    quartiles_s: Sequence[tuple[float, float, float]],
) -> Curve:
    """A curve fitted to the quartiles of the times at each amount. Raises ValueError.

    `quartiles_s` has the first quartile, median and third quartile in seconds.
    """
    first, median, third = zip(*quartiles_s, strict=True)
    fit = fit_linear(amounts, median)
    rates = [amount / t for amount, t in zip(amounts, median, strict=True)]
    return Curve(
        name=name,
        settings=settings,
        unit=unit,
        amounts=tuple(amounts),
        median_s=median,
        first_quartile_s=first,
        third_quartile_s=third,
        alpha_s=fit.line.alpha_s,
        beta_s=fit.line.beta_s,
        r_squared=fit.r_squared,
        efficiency=tuple(rate / max(rates) for rate in rates),
    )
