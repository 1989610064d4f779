"""Writer of a run's scalars for TensorBoard, in the training thread. Imports no jax.

The writer of tensorboardX has a queue that blocks forever once its thread has ended, which a full disk causes.
"""

import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from moe_jax.files.atomic import AppendOnlyFile

_VERSION = "brain.Event:2"  # of the event file format
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


@final
class Scalars:
    """One event file, as a context manager. It hides the scalars of earlier files for steps after `start_step`."""

    def __init__(self, folder: Path, start_step: int) -> None:
        """Raises OSError if the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{_newest_stamp(folder):010}.{socket.gethostname()}.from{start_step}"
        self.file = AppendOnlyFile(folder / name)
        first_hidden = start_step + 1 if start_step else 0
        self._write(file_version=_VERSION)
        self._write(step=first_hidden, file_version=_VERSION)
        self._write(step=first_hidden, session_log={"status": 1})  # START

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def write(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Add the scalars of a step; returns whether they are in the file. If not, they wait for space on the disk."""
        return self._write(
            step=step, summary={"value": [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]}
        )

    def _write(self, **fields: Any) -> bool:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        content = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
        return self.file.append(b"".join((length, next(checksums), content, next(checksums))))


def _newest_stamp(folder: Path) -> int:
    """The current Unix time, or more if needed to be above the stamps of all files there.

    TensorBoard reads files in the order of their stamps; this keeps it right if the clock was set back.
    """
    found = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return max(int(time.time()), *(stamp + 1 for stamp in found)) if found else int(time.time())
