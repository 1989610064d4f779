"""Numbers of plans as text, in suitable units."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(value: float) -> str:
    """Format seconds with a suitable unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def amount(value: float) -> str:
    """Format an amount, without fractions if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Format bytes in the largest unit with a nonzero digit before the point."""
    factor, unit = next((each for each in _UNITS if round(num_bytes / each[0], 1) >= 1), _UNITS[-1])
    return f"{num_bytes / factor:.1f} {unit}"
