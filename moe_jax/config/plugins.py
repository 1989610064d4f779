"""Parts that a setting names: the project's own by a word, others as `package.module:name`."""

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from moe_jax.errors import ConfigError, UserError


def named(setting: str, value: str, own: Mapping[str, Any]) -> Any:
    """What `value` names: one of the project's own, or something in a module that is imported now. Raises ConfigError.

    Python finds modules from the folder that a command runs in, and those that are installed.
    """
    if value in own:
        return own[value]
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}={value}: importing {module_name} says {str(error)!r}: "
            "name a module of the folder that the command runs in, or an installed one"
        ) from None
    except (Exception, SystemExit) as error:  # of the module itself
        raise ConfigError(
            f"{setting}={value}: importing {module_name} ends with {first_line_of(error)}: mend it"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        cure = f"did you mean {near[0]}?" if near else "use a name that it defines"
        raise ConfigError(f"{setting}={value}: {module_name} has no {name}: {cure}")
    return getattr(module, name)


def guarded(part: str, form: str, function: Any) -> Callable[..., Any]:
    """A function from elsewhere; what it raises becomes a ConfigError that names `part` and says its `form`."""

    @functools.wraps(function, updated=())
    def call(*arguments: Any, **named_arguments: Any) -> Any:
        try:
            return function(*arguments, **named_arguments)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(f"{part} ends with {first_line_of(error)}: {form}") from error

    return call


def first_line_of(error: BaseException) -> str:
    """What an error of others says first."""
    return f"{type(error).__name__}: {' '.join(str(error).strip().partition(chr(10) * 2)[0].split())[:300]}"
