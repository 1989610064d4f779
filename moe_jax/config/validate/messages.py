"""Numbers that error messages suggest."""

import math


def nearest_multiples(number: int, unit: int) -> str:
    """Return the positive multiples of `unit` next to a number that is not one: "6 or 9" for 8 and 3."""
    lower = number - number % unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def all_of(names: tuple[str, ...]) -> str:
    """Return the names in words: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def divisors_text(n: int) -> str:
    """Return the divisors of `n`: "1, 2 or 4" for 4."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = [str(d) for d in sorted({*small, *(n // d for d in small)})]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
        return ", ".join(divisors[:-1]) + f" … or {divisors[-1]}"
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + f" or {divisors[-1]}"
