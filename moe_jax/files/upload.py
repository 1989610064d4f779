"""Uploads of a run's small files while it trains: what has changed goes to the bucket every few seconds."""

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self, final

from moe_jax.files.local_copy import copy_of, url_of
from moe_jax.paths import shown

EVERY_S = 15  # a metrics.jsonl is uploaded whole each time
_uploads: dict[Path, "Uploads"] = {}  # by folder, those in progress


@final
class Uploads:
    """Context manager that uploads the changed files of a folder, if it is the copy of a URL, until it ends.

    What cannot be uploaded is reported once, and tried again. If it fails at the end, leaving raises StoreError.
    """

    def __init__(self, folder: Path) -> None:
        url = url_of(folder)
        self._folder, self._copy = folder, copy_of(url) if url else None
        self._ends, self._lock, self._failed = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self._copy is not None:
            _uploads[self._folder] = self
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._copy is None:
            return
        del _uploads[self._folder]
        self._ends.set()
        self._thread.join()
        if error is None:
            self.upload()
        else:
            self._try()

    def upload(self) -> None:
        """Upload what has changed now. Raises StoreError and other OSErrors."""
        if self._copy is not None:
            with self._lock:
                self._copy.upload()

    def _run(self) -> None:
        while not self._ends.wait(EVERY_S):
            self._try()

    def _try(self) -> None:
        try:
            self.upload()
        except OSError as error:  # a StoreError, or a file that has just been deleted
            if not self._failed:
                print(f"warning: not uploaded, and tried again later: {shown(str(error))}", file=sys.stderr, flush=True)
            self._failed = True
        else:
            self._failed = False


def upload_now(folder: Path) -> None:
    """Upload what has changed in a folder that a run uploads; nothing for other folders. Raises StoreError."""
    if folder in _uploads:
        _uploads[folder].upload()
