"""Paths in configs and on command lines, with `~` and variables replaced where they are read."""

import os
import re

# settings that name a file or a folder
SETTINGS = frozenset(
    {
        *("data.path", "data.tokenizer", "train.init_from", "log.dir", "checkpoint.safety_copies_dir"),
        *("schedule.task_times", "tune.cache", "plan.cluster"),
    }
)
# lists of settings, and the key of each item that names a file or a folder
_IN_LISTS = {"data.sources": "path"}
_IN_LIST = re.compile(r"(.+)\[\d+\]\.(\w+)")  # data.sources[0].path
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PATTERNS = "*?[]\\"  # characters that orbax and tensorstore read as patterns


def names_path(setting: str) -> bool:
    """Return whether a setting, such as log.dir or data.sources[0].path, names a file or a folder."""
    item = _IN_LIST.fullmatch(setting)
    return setting in SETTINGS or (item is not None and _IN_LISTS.get(item[1]) == item[2])


def plain_path(text: str) -> str:
    """Return a path with `~` at its start and environment variables replaced.

    Raises ValueError for a URL, or a variable or home that does not exist. Its text continues a message that begins
    with the path.
    """
    if _URL.match(text):
        raise ValueError(
            "is a URL, and only folders and files of this machine (or mounted there) are read and written: name one"
        )

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"names the environment variable {name}, which is not set: set it, or write the path out")
        return os.environ[name]

    found = os.path.expanduser(_VARIABLE.sub(value, text))
    if found.startswith("~"):
        home = found.split("/")[0]
        raise ValueError(f"names a home folder, {home}, which is not known: write it out, or ./{home} for such a name")
    if "\0" in found:
        raise ValueError("has a NUL character")
    if found != text and _URL.match(found):
        raise ValueError(f"stands for {found}, which is a URL: name a folder or file of this machine")
    return found


def checkpoint_path_problem(path: str) -> str:
    """Return why the libraries that write checkpoints cannot write below a path, or "" if they can.

    Callers put the reason in brackets.
    """
    real = os.path.realpath(path)
    if found := sorted({each for each in real if each in _PATTERNS}):
        return f"{real} has {' '.join(found)} in its name, which their libraries take for patterns"
    try:
        real.encode()
    except UnicodeEncodeError:
        return f"the name of {real!a} is not UTF-8"
    return ""
