"""A disk cache of compiled programs and measured numbers, for processes that a supervisor restarts.

jax's own persistent cache does not work for this on CPUs: each process looks for a different key, and only process 0
writes. jax unpickles and runs what it loads, so the folder must not be writable by others.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.distributed.hosts import conclusion
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import is_private_folder, write_atomically, write_together
from moe_jax.measure.races import check_races
from moe_jax.schedule.xla_flags import compiler_options
from moe_jax.step.compile import StepProgram

_TIMEOUT_S = 3600  # for a process that still compiles another program
_asked: dict[str, int] = {}  # how often each program was asked for, by name
_asking = threading.Lock()
_COMPILE_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change the result of a compilation


def compiled(source: Lowered | StepProgram) -> Compiled:
    """Compile a program, or load it if the same process of this run has compiled it before.

    Raises ConfigError if others can write to the cache folder, and RaceError if CPU devices could mix up the program's
    collectives.
    """
    if PROGRAMS not in os.environ:
        return _checked(source.compile())
    lowered, key = (
        (source.lowered, source.fingerprint)
        if isinstance(source, StepProgram)
        else (source, (source.as_text(), compiler_options(jax.default_backend(), jax.devices()[0].device_kind)))
    )
    path = _path(key, jax.process_index())
    loaded = _loaded(path, lowered)
    if _all_have(hashlib.sha256(repr(key).encode()).hexdigest(), loaded is not None) and loaded is not None:
        return loaded
    _stop_jaxs_cache()
    program = _checked(source.compile())
    # programs that call back into Python (background sends) cannot be stored, nor can any on a full disk
    with suppress(AttributeError, TypeError, ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError):
        write_together({path: serialize(program)[0]}, is_shared=True)
    return program


def _loaded(path: Path, lowered: Lowered) -> Compiled | None:
    """Load a program, if it is there and intact."""
    if not path.exists():
        return None
    try:
        return deserialize_and_load(path.read_bytes(), jax.tree.structure(lowered.args_info), lowered.out_tree)
    except Exception:  # a damaged file can raise anything
        path.unlink(missing_ok=True)
        return None


def _all_have(name: str, here: bool) -> bool:
    """Return whether all processes have loaded the program of this name; all of them ask for it.

    XLA:GPU times the kernels of a program on all of its processes together. One that compiles would wait for ever for
    those that have loaded theirs, and its kernels might round in another way. `name` is the same on all processes.
    """
    if jax.default_backend() != "gpu" or jax.process_count() == 1:
        return here
    with _asking:
        _asked[name] = number = _asked.get(name, 0) + 1
    return conclusion(f"moe_jax_loaded/{name}/{number}", str(here), _all_true, _TIMEOUT_S) == str(True)


def _all_true(texts: Iterable[str]) -> str:
    return str(all(text == str(True) for text in texts))


def _stop_jaxs_cache() -> None:
    """Disable jax's cache in this process. XLA:CPU serializes a program that came from that cache without its
    functions, so it could not be run again.
    """
    if jax.default_backend() == "cpu" and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax reads the setting only once


def _checked(program: Compiled) -> Compiled:
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        check_races(program.as_text() or "")
    return program


class BackgroundCompile:
    """A program that is compiled in the background when `begin` is called, or when its result is first requested."""

    def __init__(self, pool: ThreadPoolExecutor, lower: Callable[[], Lowered | StepProgram]):
        self._pool, self._lower, self._lock = pool, lower, threading.Lock()
        self._started: Future[Compiled] | None = None

    def begin(self) -> Future[Compiled]:
        """Start the compilation and return at once; further calls return the same future."""
        with self._lock:
            self._started = self._started or self._pool.submit(lambda: compiled(self._lower()))
        return self._started

    def result(self, timeout: float | None = None) -> Compiled:
        """Wait for the compiler and return the program; raise the compiler's exception if it failed."""
        return self.begin().result(timeout)


Pending = BackgroundCompile | Future[Compiled]  # `result` waits for the program


def cached_number(name: str, measure: Callable[[], float]) -> float:
    """Return a number that takes time to measure, or the value that process 0 of this run measured before."""
    if PROGRAMS not in os.environ:
        return measure()
    path = _path(name)
    with suppress(OSError, ValueError):  # no file, or a damaged one
        return float(path.read_text())
    number = measure()
    with suppress(OSError):  # the disk is full
        write_atomically(path, repr(number), is_shared=True)
    return number


def compiler_environment() -> list[Any]:
    """Return what changes a compiled program besides its source: devices, versions, flags."""
    device = jax.local_devices()[0]
    here = [jax.__version__, jax.process_count(), jax.device_count(), device.device_kind]
    return [*here, device.client.platform_version, *(os.environ.get(name) for name in _COMPILE_ENVIRONMENT)]


def _path(*key: Any) -> Path:
    """Return the cache file for these keys on these devices, with this version of jax."""
    return _own_folder() / hashlib.sha256(repr((key, compiler_environment())).encode()).hexdigest()


def _own_folder() -> Path:
    folder = Path(os.environ[PROGRAMS])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private_folder(folder.resolve()):
        raise ConfigError(
            f"{PROGRAMS}={folder} can be written to by others, and programs stored there are run: "
            "use a folder of your own, with chmod 700"
        )
    return folder
