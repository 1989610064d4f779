"""Local copies of what lies in buckets: programs read and write these, and what has changed is uploaded.

A path on this machine stands for itself. A URL stands for a copy, which is made at its first use. All but data lies in
a temporary folder of this process; data, which is large and does not change, in XDG_CACHE_HOME or ~/.cache.
Checkpoints are not copied: processes read and write their own parts in the bucket (checkpoint/storage.py).
"""

import atexit
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import final

from moe_jax.files.object_store import PROBE, ObjectFolder, StoreError
from moe_jax.paths import COPIES, is_bucket_url

CHECKPOINTS = "checkpoints"  # the folder of a run that is not copied
LOCK = "lock"  # neither is this file
_AT_A_TIME = 8  # files
_UNFINISHED = ".part"
_LARGE = (".safetensors", ".bin")  # files of models and of prepared data
_TEXTS = (".txt", ".jsonl", ".parquet", ".array_record")  # texts as data; in the folder of a model .txt files are small
_KEPT = "generations.json"  # of the objects in a folder of the cache

Stamps = dict[str, tuple[int, int]]  # time of modification in ns and size of each file, by name


@final
class LocalCopy:
    """The copy of the folder or file at a URL. Methods raise StoreError and other OSErrors."""

    def __init__(self, url: str, path: Path, empty: tuple[str, ...] = ()) -> None:
        """Files whose names end in one of `empty` are empty in the copy."""
        self.url, self.path, self._empty = url, path, empty
        self._uploaded: Stamps = {}

    def download(self) -> None:
        """Replace the copy by what the bucket has now, which may be nothing."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        names, folder = objects_at(self.url)
        _download(folder, names, self.path if folder.url == self.url else self.path.parent, self._empty)
        self._uploaded = self._stamps()

    def upload(self) -> None:
        """Upload the files of a folder that have changed since the last time, unless they are empty.

        A config is the last: with it, the folder is a run or a model.
        """
        stamps = self._stamps()
        changed = [name for name, stamp in stamps.items() if self._uploaded.get(name) != stamp]
        for name in sorted(changed, key=lambda name: (name.startswith("config."), name)):
            try:
                content = (self.path / name).read_bytes()
            except FileNotFoundError:  # it has just been renamed or deleted
                continue
            if content:
                ObjectFolder(self.url).write(name, content)
            self._uploaded[name] = stamps[name]

    def _stamps(self) -> Stamps:
        found = {}
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            if not _is_left_out(name) and not any(part.endswith(_UNFINISHED) for part in name.split("/")):
                with suppress(FileNotFoundError):  # it has just been renamed or deleted
                    if stat.S_ISREG((facts := file.stat()).st_mode):
                        found[name] = (facts.st_mtime_ns, facts.st_size)
        return found


_copies: dict[str, LocalCopy] = {}  # by URL
_outlines: dict[str, LocalCopy] = {}
_outputs: dict[Path, LocalCopy] = {}  # by path: what the bucket has at such a URL may be read, too
_homes: list[str] = []  # temporary folders of this process


def local_path(path: str | Path) -> Path:
    """Return a path of this machine as it is, and for a URL its copy. Raises StoreError and other OSErrors."""
    return copy_of(str(path)).path if is_bucket_url(str(path)) else Path(path)


def local_data(path: str | Path) -> Path:
    """Do the same for data: a copy is kept for later processes, and downloaded again where the bucket has changed."""
    url = str(path)
    if not is_bucket_url(url):
        return Path(path)
    if url not in _copies:
        _copies[url] = _add(LocalCopy(url, _kept(url)))
    return _copies[url].path


def local_outline(path: str | Path) -> Path:
    """Return the copy of a model, or of data, in which large files are empty, for those who read only the others."""
    url = str(path)
    if not is_bucket_url(url):
        return Path(path)
    if url not in _copies and url not in _outlines:
        outline = _new(url, _TEXTS if url.endswith(_TEXTS) else _LARGE)
        outline.download()
        _outlines[url] = outline
    return (_copies.get(url) or _outlines[url]).path


def copy_of(url: str) -> LocalCopy:
    """Return the copy of a URL in this process, downloaded if it is the first use."""
    if url not in _copies:
        copy = _new(url)
        copy.download()
        _copies[url] = copy
    return _copies[url]


def url_of(path: Path) -> str | None:
    """Return the URL of which a path is the local copy; None for any other path."""
    return COPIES.get(str(path))


def upload(path: Path) -> None:
    """Upload what has been written to the copy of a URL; nothing for other paths. Raises StoreError."""
    if url := url_of(path):
        (_outputs.get(path) or _copies[url]).upload()


def download_again(path: Path) -> None:
    """Replace the copy of a URL by what the bucket has now; nothing for other paths. Raises StoreError."""
    if url := url_of(path):
        _copies[url].download()


def empty_copy(url: str) -> Path:
    """Return an empty folder, to be uploaded to a URL. Raises StoreError if the bucket cannot be written."""
    ObjectFolder(url).check(writes=True)
    copy = _new(url)
    copy.path.mkdir()
    _outputs[copy.path] = copy
    return copy.path


def remove_copies() -> None:
    """Remove the temporary copies of this process, which no longer needs them."""
    while _homes:
        shutil.rmtree(_homes.pop(), ignore_errors=True)


def _is_left_out(name: str) -> bool:
    return name == LOCK or name.startswith((f"{CHECKPOINTS}/", PROBE))


def _add(copy: LocalCopy) -> LocalCopy:
    COPIES[str(copy.path)] = copy.url
    return copy


def _new(url: str, empty: tuple[str, ...] = ()) -> LocalCopy:
    """A copy in a temporary folder, which is removed when the process ends."""
    if not _homes:
        atexit.register(remove_copies)
    _homes.append(tempfile.mkdtemp(prefix="moe_jax-"))
    return _add(LocalCopy(url, Path(_homes[-1]) / url.rpartition("/")[2], empty))


def objects_at(url: str) -> tuple[list[str], ObjectFolder]:
    """Return the names of the objects at a URL, and the folder in which they have them; of a run without checkpoints.

    Raises StoreError also for names that a folder on this machine cannot have.
    """
    folder = ObjectFolder(url)
    folder.check(writes=False)
    names = [name for name in folder.names() if not _is_left_out(name) and not name.endswith("/")]
    for name in names:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise StoreError(errno.EINVAL, "a file on this machine cannot have its name", str(folder / name))
    if names:
        return names, folder
    parent, _, own = url.rpartition("/")
    above = ObjectFolder(parent)
    return ([own] if parent.count("/") > 1 and above.has(own) else []), above


def _download(folder: ObjectFolder, names: Collection[str], home: Path, empty: tuple[str, ...] = ()) -> None:
    def fetch(name: str) -> None:
        file = home / name
        if name.endswith(empty):
            file.touch()
            return
        unfinished = file.with_name(f"{file.name}{_UNFINISHED}")
        folder.download(name, unfinished)
        unfinished.replace(file)

    for parent in {(home / name).parent for name in names}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(fetch, names))


def _kept(url: str) -> Path:
    """Bring the copy of data in the cache up to date, one process of this machine at a time, and return its path."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_jax" / "objects"
    home = base / hashlib.sha256(url.encode()).hexdigest()[:16]
    home.mkdir(parents=True, exist_ok=True)
    path = home / url.rpartition("/")[2]
    with (home / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names, folder = objects_at(url)
        now = {name: folder.generation(name).hex() for name in names}
        index = home / _KEPT
        try:
            before = json.loads(index.read_text())
        except (OSError, ValueError):
            before = {}
        target = path if folder.url == url else home
        changed = [name for name in names if before.get(name) != now[name] or not (target / name).is_file()]
        for name in before.keys() - now.keys():
            (target / name).unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        _download(folder, changed, target)
        index.write_text(json.dumps(now))
    return path
