"""Rebuild the table of an array's cases by simulated annealing: python -m tests.step.fewer_cases {step,pipeline}

Takes the cases that the array has and tries, for half of --seconds, to do with one less. In the other half it
exchanges values so that programs are small by an estimate, which is fitted to the sizes of the array's programs: what
makes a program large then rarely meets twice in one. No pair is lost. Writes step_cases.txt or pipeline_cases.txt.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence

import tests.conftest  # noqa: F401 – devices
from tests.pairwise import Case
from tests.step.arrays import Array, write_table
from tests.step.case_sizes import log_factors, size_of

COLDEST, COOLING, EVERY = 0.12, 0.9995, 1024  # temperature in pairs; it falls every so many moves
WARM, COLD = 0.1, 0.02  # first and last temperature in mean programs, when sizes are reduced
FIRST_PRICE, LAST_PRICE = 0.3, 1.5  # of a pair that is missing, in mean programs


class Search:
    """Cases as lists of items, one of each factor, and how often each two items meet."""

    def __init__(self, array: Array, seed: int = 0):
        self.draw = random.Random(seed)
        self.names = [(factor, value) for factor, values in array.factors.items() for value in values]
        self.factor = [list(array.factors).index(factor) for factor, _ in self.names]
        self.items = [[i for i, own in enumerate(self.factor) if own == each] for each in range(len(array.factors))]
        count = range(len(self.names))
        self.is_bad = [
            [
                self.factor[i] != self.factor[j] and array.refusal(dict((self.names[i], self.names[j]))) is not None
                for j in count
            ]
            for i in count
        ]
        self.meetings = [[0] * len(self.names) for _ in count]
        self.missing: list[tuple[int, int]] = []
        self._place: dict[tuple[int, int], int] = {}  # in `missing`
        for i in count:
            for j in range(i):
                if self.factor[i] != self.factor[j] and not self.is_bad[i][j]:
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
            return sum(self.meetings[a][b] == 1 for at, a in enumerate(row) for b in row[:at])

        return min(range(len(self.rows)), key=lambda index: needed(self.rows[index]))

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
        pair, row = self.draw.choice(self.missing), self.draw.choice(self.rows)
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

    def shrink(self, logs: Sequence[float], seconds: float) -> None:
        """Exchange values until programs are small; `logs` are those of the factor by which an item enlarges one.

        Pairs may be missing on the way, at a price that rises. Ends with the best cases in which all meet.
        """
        sizes = [math.exp(sum(logs[item] for item in row)) for row in self.rows]
        mean, smallest, best = sum(sizes) / len(sizes), sum(sizes), [list(row) for row in self.rows]
        begun, moves, done = time.monotonic(), 0, 0.0
        while done < 1:
            if moves % EVERY == 0:
                done = (time.monotonic() - begun) / seconds
                temperature = mean * WARM * (COLD / WARM) ** done
                price = mean * (FIRST_PRICE + (LAST_PRICE - FIRST_PRICE) * done)
            moves += 1
            index = self.draw.randrange(len(self.rows))
            row = self.rows[index]
            own = self.draw.randrange(len(row))
            old, new = row[own], self.draw.choice(self.items[own])
            if new == old or not self._fits(new, row):
                continue
            lost = [self.meetings[old][other] for other in row].count(1)
            lost -= [self.meetings[new][other] for other in row].count(0) - 1  # but for the value itself
            size = sizes[index] * math.exp(logs[new] - logs[old])
            more = size - sizes[index] + price * lost
            if more > 0 and self.draw.random() > math.exp(-more / temperature):
                continue
            self.set(row, new)
            sizes[index] = size
            if not self.missing and sum(sizes) < smallest:
                smallest, best = sum(sizes), [list(row) for row in self.rows]
        self.replace(best)

    def replace(self, rows: Sequence[Sequence[int]]) -> None:
        """Take other rows instead."""
        while self.rows:
            self.remove(0)
        for row in rows:
            self.insert(list(row))

    def _fits(self, item: int, row: list[int]) -> bool:
        return not any(map(self.is_bad[item].__getitem__, row))

    def _meet(self, a: int, b: int) -> None:
        self.meetings[a][b] += 1
        self.meetings[b][a] += 1
        if self.meetings[a][b] == 1 and not self.is_bad[a][b]:
            a, b = min(a, b), max(a, b)
            last, place = self.missing.pop(), self._place.pop((a, b))
            if last != (a, b):
                self.missing[place], self._place[last] = last, place

    def _part(self, a: int, b: int) -> None:
        self.meetings[a][b] -= 1
        self.meetings[b][a] -= 1
        if not self.meetings[a][b] and not self.is_bad[a][b]:
            self._add(min(a, b), max(a, b))

    def _add(self, a: int, b: int) -> None:
        self._place[a, b] = len(self.missing)
        self.missing.append((a, b))


def main() -> None:
    """Search and write."""
    from tests.step import pipeline_settings, step_settings

    parser = argparse.ArgumentParser(description=__doc__)
    arrays = {"step": step_settings.ARRAY, "pipeline": pipeline_settings.ARRAY}
    parser.add_argument("array", choices=arrays)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    array = arrays[given.array]
    search, half_s = Search(array, given.seed), given.seconds / 2
    assert not search.missing
    logs = log_factors(search.names, array.cases, [size_of(array, case) for case in array.cases])
    deadline, found = time.monotonic() + half_s, [list(row) for row in search.rows]
    while True:
        print(f"{len(found)} cases", flush=True)
        search.remove(search.least_needed())
        if not search.anneal(deadline):
            break
        found = [list(row) for row in search.rows]
    search.replace(found)
    search.shrink(logs, half_s)
    write_table(array, search.cases())


if __name__ == "__main__":
    main()
