"""Compiled programs that outlive their process: when a supervisor starts all processes again, they load what they had.

jax's own persistent cache does not do it on CPUs, where each process looks for another key, and only process 0 writes.
jax unpickles what it loads, and runs it, so the folder must be one that nobody else can write to.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from moe_jax.errors import ConfigError
from moe_jax.files import write_together
from moe_jax.train.progress import PROGRAMS


def compiled(lowered: Lowered) -> Compiled:
    """Compile, unless this process of the same run has done so before. Raises ConfigError for a folder of others."""
    if PROGRAMS not in os.environ:
        return lowered.compile()
    made_of = [
        lowered.as_text(),
        jax.process_index(),
        jax.process_count(),
        jax.__version__,
        os.environ.get("XLA_FLAGS"),
    ]
    made_of += [jax.local_devices()[0].device_kind, jax.local_devices()[0].client.platform_version]
    path = _own_folder() / hashlib.sha256(repr(made_of).encode()).hexdigest()
    if path.exists():
        return deserialize_and_load(path.read_bytes(), jax.tree.structure(lowered.args_info), lowered.out_tree)
    program = lowered.compile()
    # what calls back into Python, say to send in the background, cannot be kept; or there is no room: compiled again
    with suppress(AttributeError, TypeError, ValueError, NotImplementedError, OSError):
        write_together({path: serialize(program)[0]})
    return program


def _own_folder() -> Path:
    folder = Path(os.environ[PROGRAMS])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{PROGRAMS}={folder} can be written to by others, and programs that lie there are run: "
            "use a folder of your own, with chmod 700"
        )
    return folder
