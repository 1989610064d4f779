"""Methods whose results are kept with their object."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_Owner = TypeVar("_Owner")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def cached_method(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Keep a method's results with the object, by positional arguments.

    A `functools.cache` of a bound method would keep its object alive until the garbage collector runs, which takes long
    in a search, since it keeps many other objects.
    """
    name = f"_results_of_{method.__name__}"

    @functools.wraps(method)
    def cached(self: _Owner, /, *arguments: Any, **no_keywords: Any) -> _Result:
        known: dict[tuple[Any, ...], _Result] = vars(self).setdefault(name, {})
        if arguments not in known:
            known[arguments] = method(self, *arguments, **no_keywords)
        return known[arguments]

    return cached
