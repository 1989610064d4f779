"""Rules for settings that name files and folders."""

import functools
import itertools

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError
from moe_jax.paths import SETTINGS, names_bucket, plain_path


def plain_setting(name: str, path: str) -> str:
    """Return a setting's path with `~` and environment variables replaced. Raises ConfigError."""
    try:
        return plain_path(path, buckets=names_bucket(name))
    except ValueError as error:
        raise ConfigError(f"{name}={path} {error}") from None


_NAMES = {
    section: tuple(name.partition(".")[2] for name in names)
    for section, names in itertools.groupby(sorted(SETTINGS), lambda name: name.partition(".")[0])
}


def check_paths(config: Sections) -> None:
    """Raise ConfigError for a path with `~` or a variable, which a config made in Python may contain."""
    for name in _NAMES:
        _check_section(name, getattr(config, name))
    for number, source in enumerate(config.data.sources):
        _check_path(f"data.sources[{number}].path", source.path)


@functools.lru_cache(maxsize=2**10)
def _check_section(name: str, section: object) -> None:
    """Check the paths of a section: cached because a plan makes thousands of configs with the same one."""
    for key in _NAMES[name]:
        _check_path(f"{name}.{key}", getattr(section, key))


def _check_path(name: str, path: str | None) -> None:
    if path is not None and (plain := plain_setting(name, path)) != path:
        raise ConfigError(f"{name}={path} is not replaced here: write {plain}")
