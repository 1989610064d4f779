"""Rebuild the table of an array's cases by simulated annealing: python -m tests.step.fewer_cases ARRAY

Takes the cases that the array has and tries, until --seconds are over, to do with one less. Then it replaces values by
earlier ones of their factors, whose programs tend to be smaller, where no pair is lost by that. Writes the array's
table. With --keep, the cases of the table stay as they are, and only those that new values need besides
are searched.
"""

import argparse
import math
import os
import random
import time
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "")  # which tests.compiled reads

from tests.pairwise import Case
from tests.step.arrays import Array, read_table, write_table

COLDEST, COOLING, EVERY = 0.12, 0.9995, 1024  # temperature in pairs; it falls every so many moves


class Search:
    """Cases as lists of items, one of each factor, and how often each two items meet."""

    def __init__(self, array: Array, seed: int = 0, kept: int = 0):
        """The first `kept` cases stay as they are."""
        self.kept = kept
        self.draw = random.Random(seed)
        self.names = [(factor, value) for factor, values in array.factors.items() for value in values]
        self.factor = [list(array.factors).index(factor) for factor, _ in self.names]
        self.items = [[i for i, own in enumerate(self.factor) if own == each] for each in range(len(array.factors))]
        count = range(len(self.names))

        def table(holds: Callable[[Case], bool]) -> list[list[bool]]:
            """Whether it holds of each two items of different factors."""
            return [
                [self.factor[i] != self.factor[j] and holds(dict((self.names[i], self.names[j]))) for j in count]
                for i in count
            ]

        self.is_bad = table(lambda pair: array.refusal(pair) is not None)
        self.is_needed = table(lambda pair: array.refusal(pair) is None and array.needs(pair))
        self.meetings = [[0] * len(self.names) for _ in count]
        self.missing: list[tuple[int, int]] = []
        self._place: dict[tuple[int, int], int] = {}  # in `missing`
        for i in count:
            for j in range(i):
                if self.is_needed[i][j]:
                    self._add(j, i)
        self.rows: list[list[int]] = []
        for case in array.cases:
            self.insert([self.names.index(item) for item in case.items()])

    def cases(self) -> list[Case]:
        return [dict(self.names[item] for item in row) for row in self.rows]

    def insert(self, row: list[int]) -> None:
        self.rows.append(row)
        for at, item in enumerate(row):
            for other in row[:at]:
                self._meet(item, other)

    def remove(self, index: int) -> None:
        row = self.rows.pop(index)
        for at, item in enumerate(row):
            for other in row[:at]:
                self._part(item, other)

    def set(self, row: list[int], item: int) -> None:
        """Put an item into a row."""
        own = self.factor[item]
        old, row[own] = row[own], item
        if old != item:
            for at, other in enumerate(row):
                if at != own:
                    self._part(old, other)
                    self._meet(item, other)

    def least_needed(self) -> int:
        """The row with the fewest pairs that no other one has."""

        def needed(row: list[int]) -> int:
            return sum(self.meetings[a][b] == 1 and self.is_needed[a][b] for at, a in enumerate(row) for b in row[:at])

        return min(range(self.kept, len(self.rows)), key=lambda index: needed(self.rows[index]))

    def anneal(self, deadline: float) -> bool:
        """Whether all pairs meet before this time."""
        temperature, moves = 0.6, 0
        while self.missing:
            moves += 1
            if moves % EVERY == 0:
                temperature = max(COLDEST, temperature * COOLING)
                if time.monotonic() > deadline:
                    return False
            self._move(temperature)
        return True

    def _move(self, temperature: float) -> None:
        """Give some row a pair that is missing, and take that back if it costs too many others."""
        pair, row = self.draw.choice(self.missing), self.rows[self.draw.randrange(self.kept, len(self.rows))]
        old, before = list(row), len(self.missing)
        for item in pair:
            self.set(row, item)
        fixed = [self.factor[item] for item in pair]
        for own in range(len(row)):
            fitting = [i for i in self.items[own] if self._fits(i, row)]
            if own not in fixed and row[own] not in fitting and fitting:
                self.set(row, self.draw.choice(fitting))
        more = len(self.missing) - before
        fits = all(self._fits(item, row) for item in row)
        if not fits or (more > 0 and self.draw.random() > math.exp(-more / temperature)):
            for item in old:
                self.set(row, item)

    def use_usual(self) -> None:
        """Replace values by earlier ones of their factors where no pair is lost."""
        for row in self.draw.sample(self.rows[self.kept :], len(self.rows) - self.kept):
            for own in self.draw.sample(range(len(row)), len(row)):
                for item in self.items[own]:
                    if item >= row[own]:
                        break
                    if self._fits(item, row):
                        old = row[own]
                        self.set(row, item)
                        if not self.missing:
                            break
                        self.set(row, old)

    def _fits(self, item: int, row: list[int]) -> bool:
        return not any(self.is_bad[item][other] for other in row if self.factor[other] != self.factor[item])

    def _meet(self, a: int, b: int) -> None:
        self.meetings[a][b] += 1
        self.meetings[b][a] += 1
        if self.meetings[a][b] == 1 and self.is_needed[a][b]:
            a, b = min(a, b), max(a, b)
            last, place = self.missing.pop(), self._place.pop((a, b))
            if last != (a, b):
                self.missing[place], self._place[last] = last, place

    def _part(self, a: int, b: int) -> None:
        self.meetings[a][b] -= 1
        self.meetings[b][a] -= 1
        if not self.meetings[a][b] and self.is_needed[a][b]:
            self._add(min(a, b), max(a, b))

    def _add(self, a: int, b: int) -> None:
        self._place[a, b] = len(self.missing)
        self.missing.append((a, b))


def main() -> None:
    """Search and write."""
    from tests.step import pipeline_settings, step_settings

    parser = argparse.ArgumentParser(description=__doc__)
    arrays = {"step": step_settings.ARRAY, "rounded": step_settings.ROUNDED, "pipeline": pipeline_settings.ARRAY}
    parser.add_argument("array", choices=arrays)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the cases of the table")
    given = parser.parse_args()
    array = arrays[given.array]
    kept = len(read_table(array)) if given.keep else 0
    deadline, search = time.monotonic() + given.seconds, Search(array, given.seed, kept)
    assert not search.missing
    found = [list(row) for row in search.rows]
    while True:
        print(f"{len(found)} cases", flush=True)
        search.remove(search.least_needed())
        if not search.anneal(deadline):
            break
        found = [list(row) for row in search.rows]
    while search.rows:
        search.remove(0)
    for row in found:
        search.insert(row)
    search.use_usual()
    write_table(array, search.cases())


if __name__ == "__main__":
    main()
