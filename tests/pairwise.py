"""Few cases in which every two settings meet: most faults of a combination show in some pair of it."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    """The pairs of settings that a case brings together."""
    return set(combinations(case.items(), 2))


def all_pairs(groups: Sequence[Case], factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases, each a group and a value of every factor, that hold every pair of settings that goes together.

    `groups` are settings that are chosen jointly. Greedy: of some random cases, the one with most pairs that are new.
    """
    missing: set[tuple[Any, ...]] = set()
    for first, second in combinations(factors, 2):
        for values in product(factors[first], factors[second], groups):
            missing |= pairs_of(values[2] | {first: values[0], second: values[1]})
    draw = random.Random(0)
    cases = []
    while missing:
        some = [
            draw.choice(groups) | {name: draw.choice(values) for name, values in factors.items()} for _ in range(200)
        ]
        best = max(some, key=lambda case: len(pairs_of(case) & missing))
        if pairs_of(best) & missing:
            cases.append(best)
            missing -= pairs_of(best)
    return cases
