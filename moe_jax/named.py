"""Parts that a setting names: the project's own by a word, others as `package.module:name`."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from moe_jax.errors import ConfigError


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
    except Exception as error:  # of the module itself
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{setting}={value}: importing {module_name} ends with {told}: mend it") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        cure = f"did you mean {near[0]}?" if near else "use a name that it defines"
        raise ConfigError(f"{setting}={value}: {module_name} has no {name}: {cure}")
    return getattr(module, name)
