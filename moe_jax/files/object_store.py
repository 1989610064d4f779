"""Folders in object stores, `gs://BUCKET/…` and `s3://BUCKET/…`, read and written by tensorstore.

An object is complete or absent, and is replaced as a whole. There are no folders and no renames: a folder is a prefix
of names. Conditional writes compare *generations*, which tell the contents that an object has had apart.

tensorstore finds credentials where the clients of the two stores look for them, and repeats requests that a store
refuses for the moment (429, 503) or cuts off. Of the environment this module reads `AWS_ENDPOINT_URL_S3`,
`AWS_ENDPOINT_URL`, `AWS_REGION` and `AWS_DEFAULT_REGION`, which tensorstore does not.
"""

import errno
import functools
import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_jax.errors import UserError

if TYPE_CHECKING:
    import tensorstore

Spec = dict[str, Any]  # of a key-value store, for tensorstore
T = TypeVar("T")

FIRST_ANSWER_S = 30  # a store that has not answered the first request by then is not reachable from here
ANSWER_S = 600  # the same for later requests, with all repetitions
ABSENT = b"\x02"  # tensorstore's generation of an object that does not exist
_UNKNOWN = b"\x00" * 9  # the generation of content without one, as some emulators of Google's store return it
_PART_BYTES = 2**26  # of an object, read in one request
_AT_A_TIME = 16  # requests
_RETRIES = 10  # of a request, after 1, 2, 4, … and at most 32 s: three minutes
PROBE = ".moe_jax_can_write"  # an object that is written and deleted
# the beginning of tensorstore's errors: errno, reason
_CODES = {
    "NOT_FOUND": (errno.ENOENT, "it does not exist"),
    "PERMISSION_DENIED": (errno.EACCES, "no right to read or write it"),
    "UNAUTHENTICATED": (errno.EACCES, "no valid credentials"),
    "OUT_OF_RANGE": (errno.ERANGE, "it has fewer bytes"),
    "INVALID_ARGUMENT": (errno.EINVAL, "no bucket or object can have this name"),
}
_OUTAGES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "PERMISSION_DENIED", "UNAUTHENTICATED")
# of a disk: a server of files that is gone or refuses, and no descriptors left; EIO may be damage
_DISK_OUTAGES = (errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_LOGIN = {
    "gs": "run gcloud auth application-default login or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials",
}


class StoreError(UserError, OSError):
    """A request that an object store refused, or has not answered. `filename` is the URL, `strerror` the reason."""

    def __str__(self) -> str:
        scheme, bucket, _ = _parts(str(self.filename))
        cure = f"name another one, or make the bucket {bucket}"
        if self.errno in (errno.EACCES, errno.ETIMEDOUT, errno.EIO):
            cure = f"check the name and the network, and {_LOGIN[scheme]}"
        return f"{self.filename}: {self.strerror}: {cure}"


@dataclass(frozen=True)
class ObjectFolder:
    """The objects below a URL. Names are relative to it. All methods raise StoreError."""

    url: str  # without a slash at its end

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def spec(self) -> Spec:
        """Describe the folder for tensorstore."""
        scheme, bucket, path = _parts(self.url)
        kind = {"gs": "gcs", "s3": "s3"}[scheme]
        found: Spec = {"driver": kind, "bucket": bucket, "path": f"{path}/" if path else ""}
        found[f"{kind}_request_retries"] = {"max_retries": _RETRIES}
        return found if scheme == "gs" else found | _s3_settings()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object, without `stop` all up to its end. Raises if it has fewer."""
        found = self._do(lambda store: store.read(name, byte_range=slice(start, stop)), name)
        if found.state == "missing":
            raise StoreError(errno.ENOENT, _CODES["NOT_FOUND"][1], str(self / name))
        content: bytes = found.value
        return content

    def read_versioned(self, name: str) -> tuple[bytes | None, bytes]:
        """Return the content of an object, None if there is none, and its generation."""
        found = self._do(lambda store: store.read(name), name)
        generation = found.stamp.generation
        if generation == _UNKNOWN:
            generation = self.generation(name)
        return (None if found.state == "missing" else found.value), generation

    def generation(self, name: str) -> bytes:
        """Return the generation of an object, ABSENT if there is none."""
        found: bytes = self._do(lambda store: store.read(name, byte_range=slice(0, 0)), name).stamp.generation
        return found

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        self._do(lambda store: store.write(name, content), name)

    def write_if(self, generation: bytes, name: str, content: bytes | None) -> bytes | None:
        """Create or replace an object, or delete it if `content` is None, if it still has this generation.

        Returns its new generation, or None if it had another one.
        """
        found: bytes = self._do(lambda store: store.write(name, content, if_equal=generation), name).generation
        return found or None

    def has(self, name: str, size: int = 0) -> bool:
        """Whether an object exists and has at least `size` bytes."""
        try:
            self.read(name, max(size - 1, 0), size)
        except StoreError as error:
            if error.errno in (errno.ENOENT, errno.ERANGE):
                return False
            raise
        return True

    def names(self, below: str = "") -> list[str]:
        """Return the sorted names of all objects whose name begins with `below`."""
        import tensorstore

        keys = tensorstore.KvStore.KeyRange(below, below[:-1] + chr(ord(below[-1]) + 1)) if below else None
        return sorted(key.decode() for key in self._do(lambda store: store.list(keys), below))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(lambda name: self._do(lambda store: store.write(name, None), name), names))

    def download(self, name: str, file: Path) -> None:
        """Write an object to a file in an existing folder, one part at a time. Raises OSError, too."""
        before = self.generation(name)
        with file.open("wb") as out:
            while True:
                start = out.tell()
                try:
                    out.write(self.read(name, start, start + _PART_BYTES))
                except StoreError as error:
                    if error.errno != errno.ERANGE:
                        raise
                    break
            if start == 0 or self.has(name, start + 1):
                out.write(self.read(name, start))
        if self.generation(name) != before:
            raise StoreError(errno.EIO, "it changed while it was read", str(self / name))

    def check(self, writes: bool) -> None:
        """Raise StoreError if the store does not answer, refuses to be read, or, if the caller `writes`, to be written
        and listed.
        """
        self._do(lambda store: store.read(PROBE), PROBE, FIRST_ANSWER_S)
        self._do(lambda store: store.list(_empty_range()), "", FIRST_ANSWER_S)
        if writes:
            probe = f"{PROBE}.{secrets.token_hex(4)}"  # of this process
            self._do(lambda store: store.write(probe, b"."), PROBE, FIRST_ANSWER_S)
            listed = self.names(probe)
            self._do(lambda store: store.write(probe, None), PROBE)
            if not listed:  # tensorstore takes a list that Google's store refuses for an empty one
                raise StoreError(errno.EACCES, "no right to list it", self.url)

    def _do(self, request: "Callable[[tensorstore.KvStore], Any]", name: str, seconds: float | None = None) -> Any:
        """Return the result of a request about an object."""
        url, seconds = str(self / name) if name else self.url, seconds or ANSWER_S
        try:
            return request(_opened(self.url)).result(timeout=seconds)
        except TimeoutError:
            raise StoreError(errno.ETIMEDOUT, f"no answer in {seconds} s", url) from None
        except Exception as error:  # tensorstore's errors have no common type
            text = (str(error).strip() or type(error).__name__).splitlines()[0].partition(" [")[0][:200].rstrip(".")
            code = "OUT_OF_RANGE" if "Content-Range" in text else text.partition(":")[0]
            number, reason = _CODES.get(code, (errno.EIO, text))
            raise StoreError(number, reason, url) from None


def is_outage(error: Exception) -> bool:
    """Whether an error of a store, of tensorstore or of a disk says nothing about a file, only that it was not read."""
    if isinstance(error, StoreError):
        return error.errno not in (errno.ENOENT, errno.ERANGE, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in _DISK_OUTAGES
    return str(error).startswith(_OUTAGES)


@functools.cache
def _opened(url: str) -> "tensorstore.KvStore":
    import tensorstore

    return tensorstore.KvStore.open(ObjectFolder(url).spec()).result()


def _empty_range() -> Any:
    """A range with at most one name, for a request that only asks whether names may be listed."""
    import tensorstore

    return tensorstore.KvStore.KeyRange(PROBE, PROBE + "\x01")


def _parts(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the path of a URL."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return scheme, bucket, path.strip("/")


def _s3_settings() -> Spec:
    """Settings of tensorstore's S3 driver from the environment variables of Amazon's own clients."""
    known = os.environ
    found: Spec = {}
    if endpoint := known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL"):
        found["endpoint"] = endpoint
    region = known.get("AWS_REGION") or known.get("AWS_DEFAULT_REGION")
    if region or endpoint:
        found["aws_region"] = region or "us-east-1"
    if "AWS_ACCESS_KEY_ID" in known:
        kind = "environment"  # the default looks for files, too, and prints what it does not find
    elif any(os.path.exists(os.path.expanduser(known.get(name, file))) for name, file in _AWS_FILES.items()):
        kind = "default"
    elif "AWS_CONTAINER_CREDENTIALS_FULL_URI" in known or "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI" in known:
        kind = "ecs"
    else:
        kind = "default" if "AWS_WEB_IDENTITY_TOKEN_FILE" in known else "imds"
    return found | {"aws_credentials": {"type": kind}}
