"""The check that every number of a config is in the range that its field declares."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence

from moe_jax.config.ranges import ANY, Range, check_number
from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError


def _ranges(section: type, prefix: str = "") -> Iterator[tuple[str, Range]]:
    for field in dataclasses.fields(section):
        if isinstance(field.default_factory, type):
            yield from _ranges(field.default_factory, f"{prefix}{field.name}.")
        elif "range" in field.metadata:
            yield f"{prefix}{field.name}", field.metadata["range"]


RANGES: dict[str, Range] = dict(_ranges(Sections))  # by the dotted names of settings
_BY_SECTION = {
    section: {name.partition(".")[2]: name for name in names}
    for section, names in itertools.groupby(RANGES, lambda name: name.partition(".")[0])
}


def setting(config: Sections, name: str) -> object:
    """Return the value of a setting by its dotted name, e.g. `setting(config, "model.moe.top_k")`."""
    value: object = _getter(name)(config)
    return value


_getter = functools.cache(operator.attrgetter)


def check_ranges(config: Sections) -> None:
    """Raise ConfigError for a number out of its range."""
    for name in _BY_SECTION:
        check_section_ranges(name, getattr(config, name))


def check_section_ranges(name: str, section: object) -> None:
    """The same for one section."""
    for key, full_name in _BY_SECTION.get(name, {}).items():
        value = _getter(key)(section)
        if value is None or isinstance(value, tuple):
            continue
        most = RANGES["mesh.cpu_devices"].most
        if full_name == "mesh.cpu_devices" and value > most:
            raise ConfigError(
                f"mesh.cpu_devices={value} must be at most {most}, which one machine can simulate: use fewer, or "
                "python -m moe_jax.plan, which plans for clusters that need not be there"
            )
        check_number(full_name, value, RANGES[full_name], _or_null(full_name))


def check_changes(
    name: str, changes: Sequence[Sequence[float]], allowed: Range, value: str, example: Sequence[Sequence[float]]
) -> None:
    """Raise ConfigError unless a setting is a list of [step, value] pairs in the order of steps.

    `value` says in words what the second number of a pair is.
    """
    least, most, above, _ = allowed
    if changes and all(len(each) == 1 for each in changes):  # YAML's [10, 0.5], which is read as [[10], [0.5]]
        words = [f"{each:.15g}" for (each,) in changes]
        pairs = [f"[{step}, {own}]" for step, own in zip(words[::2], words[1::2], strict=False)]
        meant = example if len(words) % 2 else f"[{', '.join(pairs)}]"
        raise ConfigError(f"{name}=[{', '.join(words)}] must be a list of pairs of a step and {value}: write {meant}")
    last = 0.0
    for pair in changes:
        is_pair = len(pair) == len(("step", "value")) and float(pair[0]).is_integer() and last < pair[0] <= ANY
        if not is_pair or not least <= pair[1] <= most or (above and pair[1] == least):
            raise ConfigError(
                f"{name}={[list(each) for each in changes]} has {list(pair)}: use pairs of a step, from 1 on and "
                f"growing, and {value} {f'above {least} and' if above else f'from {least}'} up to {most:.15g}, as in "
                f"{example}"
            )
        last = pair[0]


@functools.cache
def _or_null(name: str) -> str:
    """Return the words that a message about a setting has if the setting may be null."""
    section, _, own = name.rpartition(".")
    kind = type(setting(Sections(), section)).__annotations__[own]
    return " (or null)" if isinstance(None, kind) else ""
