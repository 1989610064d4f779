"""Covering arrays of training steps: every two settings meet in some program, and each is what the reference computes.

The programs are those that runs compile: the trainer's own step, from a state to the next. Its gradients are read off
the optimizer's first moments (beta1 = 0), its new parameters are compared, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from moe_jax.config import Config
from moe_jax.errors import ConfigError
from tests.pairwise import Case, covering
from tests.step.one_step import assert_is_the_references_step, config_of_settings

FOLDER = Path(__file__).parent
Pairs = Sequence[Mapping[str, tuple[str, ...] | str]]


@dataclasses.dataclass(frozen=True)
class Array:
    """Factors, each with settings by the names of its values, the default first; and pairs that do not go together."""

    factors: Mapping[str, Mapping[str, str]]
    refused: Pairs  # by the config
    idle: Pairs  # the config takes them, and one of the two changes nothing
    refused_by_all: Pairs = ()  # by the config, whatever a third factor has
    # of values that need others to be taken at all, the values that take these
    companions: Mapping[str, Case] = dataclasses.field(default_factory=dict)
    needs: Callable[[Case], bool] = lambda pair: True  # whether two settings have to meet; another array may have them
    # of values that round to fewer digits: how far from the reference that leads, see `one_step.py`
    rounding: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    table: str = ""  # file next to this one with the cases: values by factors, which `fewer_cases.py` writes
    further: Callable[[Case], str] = lambda case: ""  # settings that depend on several factors

    @functools.cached_property
    def defaults(self) -> Case:
        return {factor: next(iter(values)) for factor, values in self.factors.items()}

    @functools.cached_property
    def cases(self) -> list[Case]:
        """Those of the table, and more for pairs that these lack, such as those of a new value."""
        factors = {name: list(values) for name, values in self.factors.items()}
        return covering(factors, lambda pair: bool(self.refusal(pair)), known=read_table(self), needs=self.needs)

    def refusal(self, case: Case) -> str | None:
        """Why settings do not go together, or None."""
        for word, pairs in (("refused", [*self.refused, *self.refused_by_all]), ("idle", self.idle)):
            if any(has(case, pair) for pair in pairs):
                return word
        return None

    def rounding_of(self, case: Case) -> float:
        """0 if nothing is rounded to fewer digits than float32 has."""
        return max((values.get(case[name], 0.0) for name, values in self.rounding.items()), default=0.0)

    def config_of(self, case: Case) -> Config:
        texts = [self.factors[name][value] for name, value in case.items()]
        return config_of_settings(" ".join([*texts, self.further(case)]))

    def check(self, case: Case) -> None:
        """That its step is the reference's."""
        assert_is_the_references_step(self.config_of(case), self.rounding_of(case))

    def check_or_search(self, case: Case) -> None:
        """The same; the message for one case of a process names the settings that are needed to break it."""
        try:
            self.check(case)
        except Exception as error:
            if _searched:
                raise
            _searched.append(case)  # it takes many programs: once is enough
            raise AssertionError(f"what breaks it: {self.smallest(case) or 'the usual settings'}; {error}") from error

    def smallest(self, case: Case) -> Case:
        """The settings that are not as usual in a case that still fails."""
        for name, usual in self.defaults.items():
            plainer = case | {name: usual}
            if case[name] != usual and self.refusal(plainer) is None:
                try:
                    self.check(plainer)
                except Exception:
                    case = plainer
        return {name: value for name, value in case.items() if value != self.defaults[name]}

    def assert_all_meet(self) -> None:
        """Each two settings in some case, or there is a reason."""
        items = [(name, value) for name, values in self.factors.items() for value in values]
        met = {frozenset(pair) for case in self.cases for pair in combinations(case.items(), 2)}
        for pair in combinations(items, 2):
            if pair[0][0] != pair[1][0]:
                taken, meet = self.refusal(dict(pair)) is None, frozenset(pair) in met
                assert meet == taken or not (meet or self.needs(dict(pair))), pair

    def assert_left_out_is_refused(self) -> None:
        for pair in self.refused:
            (first, firsts), (second, seconds) = ((name, as_tuple(values)) for name, values in pair.items())
            for one in firsts:
                for other in seconds:
                    case = self.defaults | self.companions.get(one, {}) | {first: one, second: other}
                    assert self._is_refused(case), f"{one} with {other}"
        for pair in self.refused_by_all:
            needed = [self.companions.get(str(value), {}) for value in pair.values()]
            thirds = {name for companions in needed for name in companions} - pair.keys()
            for values in product(*(self.factors[name] for name in thirds)):
                case = self.defaults | pair | dict(zip(thirds, values, strict=True))
                assert self._is_refused(case), case

    def _is_refused(self, case: Case) -> bool:
        try:
            self.config_of(case)
        except ConfigError:
            return True
        return False


def read_table(array: Array) -> list[Case]:
    """Return the cases of its table. Factors added since have defaults; cases with removed values are left out."""
    names, *rows = [line.split() for line in (FOLDER / array.table).read_text().splitlines()]
    cases = [array.defaults | dict(zip(names, row, strict=True)) for row in rows]
    return [
        {name: case[name] for name in array.factors}
        for case in cases
        if all(value in array.factors.get(name, ()) for name, value in case.items()) and array.refusal(case) is None
    ]


def write_table(array: Array, cases: Sequence[Case]) -> None:
    """A line of the factors' names, and one for each case."""
    lines = [list(array.factors), *(list(case.values()) for case in cases)]
    (FOLDER / array.table).write_text("".join(" ".join(line) + "\n" for line in lines))


_searched: list[Case] = []


def has(case: Case, values: Mapping[str, tuple[str, ...] | str]) -> bool:
    """Whether the factors named all have one of these values."""
    return all(case.get(name) in as_tuple(each) for name, each in values.items())


def as_tuple(values: tuple[str, ...] | str) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else values


def name_of(case: dict[str, Any]) -> str:
    return "-".join(case.values())
