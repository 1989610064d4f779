"""Loading of parts that a setting names: built-in parts by one word, others as `package.module:name`."""

import difflib
import functools
import importlib
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_jax.errors import ConfigError, UserError

_PROJECT = (f"{Path(__file__).parents[1]}{os.sep}", "<")  # `<`: code without a file
_ARRAYS = ("jax", "jaxlib", "numpy")  # libraries that call and are called by parts
_INSTALLED = tuple({f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib")})
_PYTHON = tuple({f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib")})


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
            f"{setting}={value}: importing {module_name} ends with {first_line_of(error)}{place_of(error)}: fix it"
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
            raise ConfigError(f"{part} ends with {first_line_of(error)}{place_of(error)}: {form}") from error

    return call


def first_line_of(error: BaseException) -> str:
    """Return the type of an error and the first paragraph of its message, on one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).strip().partition(chr(10) * 2)[0].split())[:300]}"


def place_of(error: BaseException) -> str:
    """Return ` (FILE, line N)`, where in a user's files an error was raised; empty if it passed through none of them.

    That is the innermost frame that is neither in this package nor in an installed one. Of an installed package's part
    it is the function that this package has called.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    libraries = tuple(f"{folder}{name}{os.sep}" for folder in _INSTALLED for name in _ARRAYS)
    installed = [
        each for each in places if each[0].startswith(_INSTALLED) and not each[0].startswith((*_PROJECT, *libraries))
    ]
    own = [each for each in places if not each[0].startswith((*_PROJECT, *_INSTALLED, *_PYTHON))]
    if not own and not installed:
        return ""
    file, line = own[-1] if own else installed[0]
    folder = f"{Path.cwd()}{os.sep}"
    return f" ({file.removeprefix(folder)}, line {line})"
