"""Measured matrix products and attention: which point of a machine's curves predicts a product."""

import math
from collections.abc import Iterator, Sequence

from moe_jax.plan.curves import Curve

Point = tuple[float, float, float, float]  # rows, inner size, columns, and operations per second


def measured_rate(curves: Sequence[Curve], rows: float, inner: float, columns: float) -> float | None:
    """Operations per second of the measured product with the most similar sizes, by their ratios; None without any."""
    points = list(_points(curves))
    if not points:
        return None
    sizes = [max(size, 1.0) for size in (rows, inner, columns)]

    def apart(point: Point) -> float:
        return sum(abs(math.log(known / size)) for known, size in zip(point, sizes, strict=False))

    return min(points, key=apart)[3]


def _points(curves: Sequence[Curve]) -> Iterator[Point]:
    """The points of square products, and of skinny ones: each run of these is two products, counted as equally long."""
    for curve in curves:
        if curve.name not in ("matmul", "matmul.skinny"):
            continue
        width = curve.settings["width"]
        columns = curve.settings.get("columns", width)
        for flops, seconds in zip(curve.amounts, curve.median_s, strict=True):
            rows = flops / (2 * width * columns * (2 if "columns" in curve.settings else 1))
            yield rows, width, columns, flops / seconds
            if columns != width:
                yield rows, columns, width, flops / seconds


def measured_attention(curves: Sequence[Curve], length: int, head_dim: int) -> float | None:
    """Operations per second of measured attention, masked pairs counted; None if it was not measured."""
    known = [curve for curve in curves if curve.name == "attention"]
    if not known:
        return None
    nearest = min(known, key=lambda curve: abs(math.log(curve.settings["head_dim"] / head_dim)))
    flops = 4.0 * length**2 * nearest.settings["heads"] * nearest.settings["head_dim"]
    return flops / nearest.seconds(flops)
