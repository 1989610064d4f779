"""Rebuild the table of an array's cases by simulated annealing: python -m tests.step.fewer_cases ARRAY

Takes the cases that the array has and tries, until --seconds are over, to do with one less. Then it replaces values by
earlier ones of their factors, whose programs tend to be smaller, where no pair is lost by that. Writes the array's
table. With --keep, the cases of the table stay as they are, and only those that new values need besides
are searched. With --cheaper N, their number stays as it is: N random programs show how large those of all cases are,
and values are exchanged between cases, so that few programs have several settings that enlarge them.
"""

import argparse
import math
import random
import time
from collections.abc import Callable

import tests.conftest  # noqa: F401  XLA's flags, before jax starts
from tests.pairwise import Case
from tests.step.arrays import Array, read_table, write_table
from tests.step.program_sizes import Sampled, Sizes

COLDEST, COOLING, EVERY = 0.12, 0.9995, 1024  # temperature in pairs; it falls every so many moves
HOT_S, COLD_S, PAIR_S = 1.5, 0.03, 6.0  # temperatures in seconds of tests, and what a missing pair is worth
ROUNDS = 3  # of searches, each with a better model


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
        missing, before = len(self.missing), self._give_missing()
        more = len(self.missing) - missing
        if more > 0 and self.draw.random() > math.exp(-more / temperature):
            self._restore(before)

    def _give_missing(self) -> dict[int, list[int]]:
        """Give some row a pair that is missing, and other values where they do not fit; return the row as it was.

        Returns an empty one, and changes nothing, if none fit.
        """
        pair, index = self.draw.choice(self.missing), self.draw.randrange(self.kept, len(self.rows))
        row = self.rows[index]
        before = {index: list(row)}
        for item in pair:
            self.set(row, item)
        fixed = [self.factor[item] for item in pair]
        for own in range(len(row)):
            fitting = [i for i in self.items[own] if self._fits(i, row)]
            if own not in fixed and row[own] not in fitting and fitting:
                self.set(row, self.draw.choice(fitting))
        if all(self._fits(item, row) for item in row):
            return before
        self._restore(before)
        return {}

    def cheapen(self, sizes: Sizes, seconds: float) -> None:
        """Exchange values so that all tests together take less time, as estimated; all pairs meet in the end."""
        costs = [sizes.seconds(row) for row in self.rows]
        least, best, begin, moves, temperature = (
            sum(costs),
            [list(row) for row in self.rows],
            time.monotonic(),
            0,
            HOT_S,
        )
        while True:
            moves += 1
            if moves % EVERY == 0:
                if not self.missing and sum(costs) < least:
                    least, best = sum(costs), [list(row) for row in self.rows]
                done = (time.monotonic() - begin) / seconds
                if done >= 1:
                    break
                temperature = HOT_S * (COLD_S / HOT_S) ** done
            missing, before = len(self.missing), self._change()
            found = {index: sizes.seconds(self.rows[index]) for index in before}
            more = sum(found[index] - costs[index] for index in before) + PAIR_S * (len(self.missing) - missing)
            if more <= 0 or self.draw.random() < math.exp(-more / temperature):
                for index, cost in found.items():
                    costs[index] = cost
            else:
                self._restore(before)
        self._restore(dict(enumerate(best)))
        print(f"{len(best)} cases: {least:.0f} s, as estimated", flush=True)

    def _change(self) -> dict[int, list[int]]:
        """Give a row a pair that is missing, or one other value, or let two rows exchange values; return old rows."""
        index, other = (self.draw.randrange(self.kept, len(self.rows)) for _ in range(2))
        own, chance = self.draw.randrange(len(self.items)), self.draw.random()
        if self.missing and chance < 0.3:
            return self._give_missing()
        if chance < 0.7:
            item = self.draw.choice(self.items[own])
            changes = {index: item} if self._fits(item, self.rows[index]) else {}
        else:
            here, there = self.rows[index][own], self.rows[other][own]
            fit = self._fits(there, self.rows[index]) and self._fits(here, self.rows[other])
            changes = {index: there, other: here} if fit else {}
        before = {changed: list(self.rows[changed]) for changed in changes}
        for changed, item in changes.items():
            self.set(self.rows[changed], item)
        return before

    def _restore(self, rows: dict[int, list[int]]) -> None:
        for index, row in rows.items():
            for item in row:
                self.set(self.rows[index], item)

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
    parser.add_argument("--cheaper", type=int, metavar="SAMPLES", help="look for smaller programs, not for fewer")
    given = parser.parse_args()
    array = arrays[given.array]
    kept = len(read_table(array)) if given.keep else 0
    search = Search(array, given.seed, kept)
    assert not search.missing
    if given.cheaper:
        make_cheaper(array, search, given.cheaper, given.seconds, given.seed)
    else:
        make_fewer(search, given.seconds)
    write_table(array, search.cases())


def make_fewer(search: Search, seconds: float) -> None:
    """Do with fewer cases, of usual values."""
    deadline = time.monotonic() + seconds
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


def make_cheaper(array: Array, search: Search, samples: int, seconds: float, seed: int) -> None:
    """Do with smaller programs: those that a first model finds small show where it is wrong."""
    sampled = Sampled(array, search.names, seed)
    sampled.add_random(samples)
    for _ in range(ROUNDS):
        sampled.add(search.cases())
        search.cheapen(sampled.fitted(), seconds / ROUNDS)


if __name__ == "__main__":
    main()
