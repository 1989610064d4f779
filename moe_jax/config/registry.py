"""The registries of built-in parts. Each part is one file in the folder of its kind.

The file of a gate declares `FACTS = GateFacts(...)`, and files of other kinds declare the facts of their kind. Settings
and plans need these facts but must not import jax, which the files of gates and exchanges import. Therefore the
registry parses the source, and evaluates only the value assigned to `FACTS`: plain values, and names of
`config/facts.py`. A file without `FACTS` is a helper, not a part. A file with `FACTS` must also define the names of its
kind, such as `GATE`. The packages of the parts import the files themselves, with `modules`.
"""

import ast
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.resources import files
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from moe_jax.config import facts as declarations
from moe_jax.config.facts import (
    DispatcherFacts,
    ExchangeFacts,
    Facts,
    GateFacts,
    HooksFacts,
    OptimizerFacts,
    PipelineFacts,
    PolicyFacts,
    ReductionFacts,
)
from moe_jax.errors import ConfigError

F = TypeVar("F", bound=Facts)
_NAME = "FACTS"


class Part(NamedTuple, Generic[F]):
    """The file name of a part, without `.py`, its declaration, and the names that the file fails to define."""

    file: str
    facts: F
    missing: tuple[str, ...]


class Registry(Mapping[str, F]):
    """The facts of all parts of a kind, by name, in the order of `Facts.listed`."""

    def __init__(self, package: str, kind: type[F], defines: Callable[[F], tuple[str, ...]]):
        """`defines` gives the names that the file of a part with these facts must define."""
        self._package, self._kind, self._defines, self._default = package, kind, defines, kind()

    @cached_property
    def _parts(self) -> Mapping[str, Part[F]]:
        _, *folders = self._package.split(".")
        sources = {
            each.name.removesuffix(".py"): each.read_text("utf-8")
            for each in files("moe_jax").joinpath(*folders).iterdir()
            if each.name.endswith(".py")
        }
        parts = [
            (facts.name or file, Part(file, facts, self.missing(facts, source)))
            for file, source in sorted(sources.items())
            if (facts := self.declared(file, source))
        ]
        found = dict(sorted(parts, key=lambda part: (part[1].facts.listed, part[0])))
        if len(found) < len(parts):
            raise TypeError(f"{self._package} has two parts of one name among {', '.join(found)}")
        return found

    def declared(self, file: str, source: str) -> F | None:
        """Return the value of a file's `FACTS`, or None if it has none. Raises TypeError for another kind of value."""
        expression = _assigned(source)
        if expression is None:
            return None
        where = f"{self._package}.{file}: {_NAME}"
        try:
            facts = _value(expression)
        except (AttributeError, TypeError, ValueError) as error:
            raise TypeError(f"{where}: {error}: use plain values and names of moe_jax/config/facts.py") from error
        if not isinstance(facts, self._kind):
            raise TypeError(f"{where} must be a {self._kind.__name__}, not {type(facts).__name__}")
        return facts

    def missing(self, facts: F, source: str) -> tuple[str, ...]:
        """Return the names that a file must define for its facts, and does not."""
        defined = {*_defined(_statements(source))}
        return tuple(name for name in self._defines(facts) if name not in defined)

    def check(self) -> None:
        """Raise ConfigError for a part whose file does not define what it must."""
        for part in self._incomplete:
            file = f"{self._package.replace('.', '/')}/{part.file}.py"
            raise ConfigError(
                f"{file} declares {_NAME} and defines no {' and no '.join(part.missing)}: add it (docs/extend.md), "
                f"or remove {_NAME} if the file is no part"
            )

    @cached_property
    def _incomplete(self) -> list[Part[F]]:
        return [part for part in self._parts.values() if part.missing]

    def __getitem__(self, name: str) -> F:
        return self._parts[name].facts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def of(self, name: str) -> F:
        """Return the facts of the part that a setting names: the defaults for `auto` and for external parts."""
        part = self._parts.get(name)
        return self._default if part is None else part.facts

    def modules(self) -> dict[str, ModuleType]:
        """Import the modules of all parts that are complete, and return them by the parts' names.

        `check` reports the others, once a command can answer in one line.
        """
        whole = {name: part.file for name, part in self._parts.items() if not part.missing}
        return {name: importlib.import_module(f"{self._package}.{file}") for name, file in whole.items()}


@lru_cache(maxsize=1)  # the names of a part are looked up right after its facts
def _statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _assigned(source: str) -> ast.expr | None:
    """Return the expression that a module assigns to `FACTS`, or None."""
    for statement in _statements(source) if _NAME in source else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == _NAME:
                return value
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if name == _NAME:
                return value
    return None


def _defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that the statements of a module define or import, also in branches."""
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (each.asname or each.name for each in names)
            case ast.If(body=body, orelse=orelse) | ast.Try(body=body, orelse=orelse):
                yield from _defined([*body, *orelse])
            case _:
                stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
                yield from (each.id for each in stored if isinstance(each.ctx, ast.Store))


def _value(expression: ast.expr) -> object:
    """Evaluate plain values and names of `config/facts.py`. Raises AttributeError or ValueError for anything else."""
    match expression:
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named):
            made: object = getattr(declarations, name)(
                *map(_value, values), **{str(each.arg): _value(each.value) for each in named}
            )
            return made
        case ast.Name(id=name):
            return getattr(declarations, name)
        case ast.Tuple(elts=values):
            return tuple(map(_value, values))
        case _:
            return ast.literal_eval(expression)


NO_HOOKS = "none"  # the value of model.moe.hooks for no hooks
OPEN_EXCHANGE = "auto"  # the value of exchange.algorithm for a choice that depends on the devices

GATE_FACTS = Registry("moe_jax.models.gates", GateFacts, lambda _: ("GATE",))
DISPATCHER_FACTS = Registry("moe_jax.models.dispatchers", DispatcherFacts, lambda _: ("DISPATCHER",))
HOOKS_FACTS = Registry("moe_jax.models.hooks", HooksFacts, lambda _: ("HOOKS",))
EXCHANGE_FACTS = Registry(
    "moe_jax.parallel.all_to_all", ExchangeFacts, lambda facts: () if facts.ragged else ("start", "finish")
)
REDUCTION_FACTS = Registry(
    "moe_jax.parallel.reductions",
    ReductionFacts,
    lambda facts: ("start", "start_scatter", "finish") if facts.only_starts else ("reduce", "scatter"),
)
POLICY_FACTS = Registry("moe_jax.schedule.policies", PolicyFacts, lambda _: ("POLICY",))
PIPELINE_FACTS = Registry("moe_jax.schedule.pipelines", PipelineFacts, lambda _: ("order",))
OPTIMIZER_FACTS = Registry("moe_jax.step.optimizers", OptimizerFacts, lambda _: ("scale",))
REGISTRIES: tuple[Registry[Any], ...] = (
    GATE_FACTS,
    DISPATCHER_FACTS,
    HOOKS_FACTS,
    EXCHANGE_FACTS,
    REDUCTION_FACTS,
    POLICY_FACTS,
    PIPELINE_FACTS,
    OPTIMIZER_FACTS,
)
