"""Compiled programs, and numbers, that outlive their process: started again by a supervisor, it loads what it had.

jax's own persistent cache does not do it on CPUs, where each process looks for another key, and only process 0 writes.
jax unpickles what it loads, and runs it, so the folder must be one that nobody else can write to.
"""

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import is_private_folder, write_atomically, write_together
from moe_jax.measure.races import check_races
from moe_jax.schedule.xla_flags import compiler_options
from moe_jax.step.compile import StepProgram

_SAY_HOW = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # to compile, in the environment


def compiled(source: Lowered | StepProgram) -> Compiled:
    """Compile, unless this process of the same run has done so before.

    Raises ConfigError for a folder of others, and RaceError for a program that devices of this CPU would mix up.
    """
    if PROGRAMS not in os.environ:
        return _checked(source.compile())
    lowered, made_of = (
        (source.lowered, source.fingerprint)
        if isinstance(source, StepProgram)
        else (source, (source.as_text(), compiler_options(jax.default_backend())))
    )
    path = _path(made_of, jax.process_index())
    if path.exists():
        try:
            return deserialize_and_load(path.read_bytes(), jax.tree.structure(lowered.args_info), lowered.out_tree)
        except Exception:  # a damaged file ends in any way
            path.unlink(missing_ok=True)
    _stop_jaxs_cache()
    program = _checked(source.compile())
    # what calls back into Python, say to send in the background, cannot be kept; or there is no room: compiled again
    with suppress(AttributeError, TypeError, ValueError, NotImplementedError, OSError):
        write_together({path: serialize(program)[0]})
    return program


def _stop_jaxs_cache() -> None:
    """For this process. XLA:CPU writes a program that came from that cache without its functions: nobody can run it."""
    if jax.default_backend() == "cpu" and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it looks at the setting once


def _checked(program: Compiled) -> Compiled:
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        check_races(program.as_text() or "")
    return program


class Later:
    """A program that is compiled in the background once `begin` is called, or as soon as somebody waits for it."""

    def __init__(self, pool: ThreadPoolExecutor, lower: Callable[[], Lowered | StepProgram]):
        self._pool, self._lower, self._lock = pool, lower, threading.Lock()
        self._begun: Future[Compiled] | None = None

    def begin(self) -> Future[Compiled]:
        """Returns at once; called again, it does nothing more."""
        with self._lock:
            self._begun = self._begun or self._pool.submit(lambda: compiled(self._lower()))
        return self._begun

    def result(self, timeout: float | None = None) -> Compiled:
        """Waits for the compiler; raises what stopped it."""
        return self.begin().result(timeout)


Pending = Later | Future[Compiled]  # whose `result` waits for the program


def kept(name: str, measure: Callable[[], float]) -> float:
    """A number that takes time to measure, unless process 0 of the same run has measured it before."""
    if PROGRAMS not in os.environ:
        return measure()
    path = _path(name)
    with suppress(OSError, ValueError):  # there is none, or a damaged one
        return float(path.read_text())
    number = measure()
    with suppress(OSError):  # no room
        write_atomically(path, repr(number))
    return number


def _path(*made_of: Any) -> Path:
    """Of what follows from these things on these devices."""
    device = jax.local_devices()[0]
    here = [jax.__version__, jax.process_count(), jax.device_count(), device.device_kind]
    here += [device.client.platform_version, *(os.environ.get(name) for name in _SAY_HOW)]
    return _own_folder() / hashlib.sha256(repr((made_of, here)).encode()).hexdigest()


def _own_folder() -> Path:
    folder = Path(os.environ[PROGRAMS])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private_folder(folder.resolve()):
        raise ConfigError(
            f"{PROGRAMS}={folder} can be written to by others, and programs that lie there are run: "
            "use a folder of your own, with chmod 700"
        )
    return folder
