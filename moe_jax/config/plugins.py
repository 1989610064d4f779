"""Loading of parts that a setting names: built-in parts by one word, others as `package.module:name`."""

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from moe_jax.errors import ConfigError, UserError


def load_part(setting: str, value: str, own: Mapping[str, Any]) -> Any:
    """Return the part that `value` names: one of the built-in parts `own`, or an attribute of a module.

    The module is imported by this call. Python finds installed modules, and modules in the folder that the command
    runs in. Raises ConfigError if the import fails or the module has no such attribute.
    """
    if value in own:
        return own[value]
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}={value}: importing {module_name} fails with {str(error)!r}: "
            "name a module of the folder that the command runs in, or an installed one"
        ) from None
    except (Exception, SystemExit) as error:  # raised by the module itself
        raise ConfigError(
            f"{setting}={value}: importing {module_name} ends with {first_line_of(error)}: fix it"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        cure = f"did you mean {near[0]}?" if near else "use a name that it defines"
        raise ConfigError(f"{setting}={value}: {module_name} has no {name}: {cure}")
    return getattr(module, name)


def guarded(part: str, form: str, function: Any) -> Callable[..., Any]:
    """Wrap a function of another package: its errors become a ConfigError with the `part` and its expected `form`."""

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
    """Return the type of an error and the first paragraph of its message, on one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).strip().partition(chr(10) * 2)[0].split())[:300]}"
