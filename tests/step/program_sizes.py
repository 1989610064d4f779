"""How large the programs of an array's cases are: some are lowered, and a model of their lines is fitted to these.

Lines of StableHLO are the product of a factor for each value that a case has, and for each two of the values with the
largest factors. Of steps that were held out, the estimate is a third off. A test takes about lines ** 1.1 / 6700
seconds.
"""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import jax
import numpy as np

from moe_jax.errors import ConfigError
from tests.pairwise import Case
from tests.step.arrays import Array
from tests.step.one_step import program_of

IN_PAIRS = 14  # values with a factor for each pair of them
DROP_EVERY = 40  # programs


class Sizes(NamedTuple):
    """Logarithms of factors by items, which are values of factors."""

    of_all: float
    of_item: list[float]
    of_pair: dict[tuple[int, int], float]  # the smaller item first
    in_pairs: frozenset[int]

    def seconds(self, row: Sequence[int]) -> float:
        """Estimate how long the test of a case takes; `row` has its items, in the order of the factors."""
        pairs = combinations([item for item in row if item in self.in_pairs], 2)
        lines = self.of_all + sum(self.of_item[item] for item in row) + sum(self.of_pair[pair] for pair in pairs)
        return float(np.exp(1.1 * lines) / 6700)


class Sampled:
    """Programs of an array that were lowered."""

    def __init__(self, array: Array, names: Sequence[tuple[str, str]], seed: int):
        """`names` are the items."""
        self._array, self._names, self._draw = array, names, random.Random(seed)
        self._rows: list[list[int]] = []
        self._lines: list[float] = []

    def add_random(self, count: int) -> None:
        """Lower random cases."""
        self.add([_random_case(self._array, self._draw) for _ in range(count)])

    def add(self, cases: Sequence[Case]) -> None:
        """Lower these, but for those of three settings that do not go together."""
        for number, case in enumerate(cases):
            if number % DROP_EVERY == 0:
                jax.clear_caches()
                print(f"lowered {number} of {len(cases)}", flush=True)
            try:
                program, arguments = program_of(self._array.config_of(case))
            except ConfigError:
                continue
            self._rows.append([self._names.index(item) for item in case.items()])
            self._lines.append(np.log(program.lower(*arguments).as_text().count("\n")))

    def fitted(self) -> Sizes:
        """A model of their sizes."""
        names, items = self._names, len(self._names)
        one_by_one = self._ridge([])[1:]
        heaviest = sorted(range(items), key=lambda item: -abs(one_by_one[item]))[:IN_PAIRS]
        pairs = [pair for pair in combinations(sorted(heaviest), 2) if names[pair[0]][0] != names[pair[1]][0]]
        of_all, *factors = self._ridge(pairs)
        of_pair = dict(zip(pairs, factors[items:], strict=True))
        return Sizes(of_all, factors[:items], of_pair, frozenset(heaviest))

    def _ridge(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Least squares with small coefficients: a constant, one for each item, and one for each of these pairs."""
        items = len(self._names)
        present = np.zeros((len(self._rows), items))
        for at, row in enumerate(self._rows):
            present[at, row] = 1
        both = [present[:, first] * present[:, second] for first, second in pairs]
        columns = np.column_stack([np.ones(len(self._rows)), present, *both])
        penalty = np.diag([1e-6, *[0.5] * items, *[2.0] * len(pairs)])
        solved: list[float] = np.linalg.solve(columns.T @ columns + penalty, columns.T @ np.array(self._lines)).tolist()
        return solved


def _random_case(array: Array, draw: random.Random) -> Case:
    """A case that no rule for two settings refuses."""
    while True:
        case: Case = {}
        for name in draw.sample(list(array.factors), len(array.factors)):
            values = draw.sample(list(array.factors[name]), len(array.factors[name]))
            fitting = [value for value in values if array.refusal({**case, name: value}) is None]
            if not fitting:
                break
            case[name] = fitting[0]
        else:
            return {name: case[name] for name in array.factors}
