"""Rules for settings that name files and folders."""

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError
from moe_jax.paths import SETTINGS, plain_path


def plain_setting(name: str, path: str) -> str:
    """Return a setting's path with `~` and environment variables replaced. Raises ConfigError."""
    try:
        return plain_path(path)
    except ValueError as error:
        raise ConfigError(f"{name}={path} {error}") from None


_NAMES = tuple((name, *name.split(".")) for name in sorted(SETTINGS))


def check_paths(config: Sections) -> None:
    """Raise ConfigError for a path with `~` or a variable, which a config made in Python may contain."""
    for name, section, key in _NAMES:
        _check_path(name, getattr(getattr(config, section), key))
    for number, source in enumerate(config.data.sources):
        _check_path(f"data.sources[{number}].path", source.path)


def _check_path(name: str, path: str | None) -> None:
    if path is not None and (plain := plain_setting(name, path)) != path:
        raise ConfigError(f"{name}={path} is not replaced here: write {plain}")
