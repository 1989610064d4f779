"""Places that commands read and write: paths on this machine, or URLs of buckets, which have local copies."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_jax.errors import ConfigError, plain_argument
from moe_jax.files.local_copy import empty_copy, local_path, upload, url_of
from moe_jax.files.object_store import ObjectFolder, StoreError
from moe_jax.paths import is_bucket_url, plain_path


def parse_place(name: str, text: str) -> Path:
    """Return the path that an argument of a command line names, or the copy of its URL. Raises ConfigError."""
    return local_path(plain_argument(name, text, buckets=True))


def place(text: str) -> str:
    """Return the path or URL that an argument names, for argparse, with `~` and variables replaced. Reads nothing."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} names no file or folder")
    try:
        return plain_path(text, buckets=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} {error}") from None


def output_folder(place: str) -> Path:
    """Return the folder of a place to write, which is an empty copy of a URL, to be uploaded.

    Raises StoreError if the bucket cannot be written.
    """
    return empty_copy(place) if is_bucket_url(place) else Path(place)


def output_file(place: str) -> Path:
    """Do the same for a file; what is written next to it is uploaded with it, as `upload(path.parent)`."""
    parent, _, name = place.rpartition("/")
    return empty_copy(parent) / name if is_bucket_url(place) else Path(place)


@contextmanager
def all_uploaded_or_nothing(path: Path) -> Iterator[None]:
    """Context in which the copy of a URL that has nothing yet is filled, and then uploaded; nothing for other paths.

    If that fails, the bucket has only what it had before.
    """
    url = url_of(path)
    before = set(ObjectFolder(url).names()) if url else set()
    try:
        yield
        upload(path)
    except BaseException:
        if url:
            with suppress(StoreError):  # an error that says why is already being raised
                ObjectFolder(url).delete(set(ObjectFolder(url).names()) - before)
        raise


@contextmanager
def new_folder(name: str, place: str) -> Iterator[Path]:
    """Context with the folder to make for the argument `name`; a bucket gets all of it at the end, or nothing.

    Raises StoreError if the bucket cannot be written, and ConfigError if it has anything there.
    """
    folder = output_folder(place)
    check_is_empty(name, folder)
    with all_uploaded_or_nothing(folder):
        yield folder


def check_is_empty(name: str, path: Path) -> None:
    """Raise ConfigError if a path is the copy of a URL at which a bucket has anything."""
    if (url := url_of(path)) and ObjectFolder(url).names():
        raise ConfigError(f"{name}={url} exists and is not an empty folder: name another one, or remove it")


def place_of(path: Path) -> str:
    """Return the name of a path in a config: the URL of which it is the copy, or the path."""
    return url_of(path) or str(path)
