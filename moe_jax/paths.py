"""Paths in configs and on command lines, with `~` and variables replaced where they are read."""

import os
import re

# settings that name a file or a folder, and those of them that may name one in a bucket
SETTINGS = frozenset(
    {
        *("data.path", "data.tokenizer", "train.init_from", "log.dir", "checkpoint.safety_copies_dir"),
        *("schedule.task_times", "tune.cache", "plan.cluster", "train.record_routing", "train.replay_routing"),
    }
)
_HERE = {"checkpoint.safety_copies_dir", "tune.cache", "train.record_routing", "train.replay_routing"}
BUCKET_SETTINGS = SETTINGS - _HERE
# lists of settings, and the key of each item that names a file or a folder, also in a bucket
_IN_LISTS = {"data.sources": "path"}
_IN_LIST = re.compile(r"(.+)\[\d+\]\.(\w+)")  # data.sources[0].path
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_BUCKET_URL = re.compile(r"(?:gs|s3)://(?P<bucket>[^/]*)(?:/(?P<path>.*))?", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # by the rules of both stores
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PATTERNS = "*?[]\\"  # characters that orbax and tensorstore read as patterns

# The folders and files on this machine that are copies of URLs, by their absolute paths: messages name the URLs.
COPIES: dict[str, str] = {}


def names_path(setting: str) -> bool:
    """Return whether a setting, such as log.dir or data.sources[0].path, names a file or a folder."""
    item = _IN_LIST.fullmatch(setting)
    return setting in SETTINGS or (item is not None and _IN_LISTS.get(item[1]) == item[2])


def names_bucket(setting: str) -> bool:
    """Return whether what a setting names may be in a bucket."""
    return names_path(setting) and setting not in SETTINGS - BUCKET_SETTINGS


def plain_path(text: str, buckets: bool = False) -> str:
    """Return a path with `~` at its start and environment variables replaced; with `buckets` it may be a URL of one.

    Raises ValueError for any other URL, or a variable or home that does not exist. Its text continues a message that
    begins with the path.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"names the environment variable {name}, which is not set: set it, or write the path out")
        return os.environ[name]

    if _URL.match(text) and not (buckets and is_bucket_url(text)):
        raise ValueError(_not_a_place(text, buckets))
    found = os.path.expanduser(_VARIABLE.sub(value, text))
    if found.startswith("~"):
        home = found.split("/")[0]
        raise ValueError(f"names a home folder, {home}, which is not known: write it out, or ./{home} for such a name")
    if "\0" in found:
        raise ValueError("has a NUL character")
    if buckets and is_bucket_url(found):
        return _plain_url(found)
    if found != text and _URL.match(found):
        raise ValueError(f"stands for {found}, which {_not_a_place(found, buckets)}")
    return found


def is_bucket_url(text: str) -> bool:
    """Whether a text is a URL of an object store: `gs://…` or `s3://…`."""
    return text.startswith(("gs://", "s3://"))


def shown(text: str) -> str:
    """Return a message in which local copies have the names of the URLs that the user has given."""
    for copy, url in COPIES.items():
        text = text.replace(copy, url)
    return text


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


def _not_a_place(url: str, buckets: bool) -> str:
    """Why a URL is refused."""
    if not buckets:
        return "is a URL, and this is read and written on this machine (or mounted there) only: name a path there"
    return (
        "is a URL, and only gs://BUCKET/NAME, s3://BUCKET/NAME and paths on this machine (or mounted there) are read "
        "and written: name one"
    )


def _plain_url(url: str) -> str:
    """Return a bucket's URL without slashes at its end. Raises ValueError if it names no folder or file in a bucket."""
    match = _BUCKET_URL.fullmatch(url)
    bucket, path = (match["bucket"], (match["path"] or "").rstrip("/")) if match else ("", "")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"names the bucket {bucket!r}, and none can have this name: write gs://BUCKET/NAME")
    if not path:
        raise ValueError(f"names a whole bucket: name a folder or a file in it, as in {url.rstrip('/')}/NAME")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("has an empty part, . or .. in its path, and names of objects are taken as they are: drop it")
    return f"{url[:5]}{bucket}/{path}"
