"""Rules for settings that name parts: built-in ones, and those of other modules."""

import difflib
import functools
import operator
import re

from moe_jax.config.registry import (
    DISPATCHER_FACTS,
    EXCHANGE_FACTS,
    GATE_FACTS,
    HOOKS_FACTS,
    NO_HOOKS,
    OPEN_EXCHANGE,
    OPTIMIZER_FACTS,
    POLICY_FACTS,
    REGISTRIES,
)
from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError

# The names of built-in parts, by setting. Other parts are named package.module:name.
BUILT_IN_PARTS = {
    "model.moe.gate": tuple(GATE_FACTS),
    "model.moe.dispatcher": tuple(DISPATCHER_FACTS),
    "model.moe.hooks": (NO_HOOKS, *HOOKS_FACTS),
    "schedule.policy": tuple(POLICY_FACTS),
    "exchange.algorithm": (OPEN_EXCHANGE, *EXCHANGE_FACTS),
    "optimizer.name": tuple(OPTIMIZER_FACTS),
}
_values_of = operator.attrgetter(*BUILT_IN_PARTS)
_OPEN = ("schedule.policy",)  # settings that may be auto until they are planned
_ELSEWHERE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_MOST_COMPARED = 200  # characters


def check_parts(config: Sections) -> None:
    """Raise ConfigError for a part that is neither built in nor of the form `package.module:name`.

    Also raises it for a built-in part whose file lacks what it must define.
    """
    for registry in REGISTRIES:
        registry.check()
    _check_names(*_values_of(config))


@functools.lru_cache(maxsize=256)
def _check_names(*values: str) -> None:
    """Check the settings of `BUILT_IN_PARTS`, in order: cached because a plan makes thousands of configs."""
    for (name, own), value in zip(BUILT_IN_PARTS.items(), values, strict=True):
        if value not in own and not _ELSEWHERE.fullmatch(value):
            near = difflib.get_close_matches(value[:_MOST_COMPARED], [*own, "auto"] if name in _OPEN else own, n=1)
            cure = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}={value} must be {_either(own)} or package.module:name{cure}")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(names) if len(names) <= 3 else f"{', '.join(names[:-1])} or {names[-1]},"
