"""Few cases in which every two settings meet: most faults of a combination show in some pair of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[str]],
    refuses: Callable[[Case], bool],
    tries: int = 100,
    seed: int = 0,
    known: Sequence[Case] = (),
    needs: Callable[[Case], bool] = lambda pair: True,
) -> list[dict[str, str]]:
    """Cases, each a value of every factor, in which every two values meet that go together; the same ones each time.

    `refuses` says of two settings whether they do not. Greedy: each case begins with a pair that is missing, and takes,
    factor by factor, the value that brings most of the missing ones, the first of several. Raises ValueError for a pair
    that no case can have although it goes together. Some seeds take fewer cases than others. `known` cases come first;
    others are only for pairs that they lack. Two settings that a case does not need to have may meet or not.
    """
    items = [(factor, value) for factor, values in factors.items() for value in values]
    of_factor = {factor: [i for i, (name, _) in enumerate(items) if name == factor] for factor in factors}
    refused, missing = [0] * len(items), [0] * len(items)  # of each item, bits of others
    for (i, one), (j, other) in combinations(enumerate(items), 2):
        if one[0] != other[0]:
            pair = dict((one, other))
            is_refused = refuses(pair)
            if is_refused or needs(pair):
                bits = refused if is_refused else missing
                bits[i] |= 1 << j
                bits[j] |= 1 << i
    draw, cases = random.Random(seed), [dict(case) for case in known]

    def met(case: int) -> None:
        for k in range(len(items)):
            missing[k] &= ~case if case >> k & 1 else -1

    for each in cases:
        met(sum(1 << i for i, (factor, value) in enumerate(items) if each[factor] == value))

    def grown(chosen: int) -> tuple[int, int]:
        """How many missing pairs a case that begins so brings, and its bits; -1 if this way ends."""
        brings, open_factors = 0, [own for own in of_factor.values() if not any(chosen >> i & 1 for i in own)]
        draw.shuffle(open_factors)
        for own in open_factors:
            gain, best = max(((missing[i] & chosen).bit_count() if not refused[i] & chosen else -1, -i) for i in own)
            best = -best
            if gain < 0:
                return -1, chosen
            brings, chosen = brings + gain, chosen | 1 << best
        return brings, chosen

    while any(missing):
        i = max(range(len(items)), key=lambda i: missing[i].bit_count())
        j = max((j for j in range(len(items)) if missing[i] >> j & 1), key=lambda j: missing[j].bit_count())
        brings, case = max(grown(1 << i | 1 << j) for _ in range(tries))
        if brings < 0:
            raise ValueError(f"no case has {items[i]} and {items[j]}")
        met(case)
        cases.append(dict(items[k] for k in range(len(items)) if case >> k & 1))
    return cases
