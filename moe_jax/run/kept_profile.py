"""The measured profile that a run keeps in its folder: times of a step's instructions, by which XLA:GPU schedules it.

A profile belongs to one program. It is measured again after a change of settings, mesh, devices, flags or versions.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_json
from moe_jax.measure.profile import is_profile
from moe_jax.paths import shown
from moe_jax.step.compile import StepProgram, has_profile
from moe_jax.step.compile_cache import compiler_environment

FILE = "step_profile.json"
_PLATFORMS = ("gpu",)  # whose compiler reads profiles
_MOST_BYTES = 16 * 2**20  # of the file, which process 0 sends to all others
_MOST_STARTS = 2  # that may end while they measure


class KeptProfile(NamedTuple):
    """What a run has measured for a program."""

    step_key: str  # `step_key` of the step by estimated times
    profile: str | None  # None: the step by estimated times is faster
    starts_ended: int = 0  # that have not finished measuring; with a program that needs too much memory, every start

    def write(self, folder: Path, step_s: dict[str, float]) -> None:
        """Write it into the run's folder, with the measured step times. Raises OSError."""
        write_atomically(folder / FILE, json.dumps(self._asdict() | {"step_s": step_s}, indent=1) + "\n")


class Measuring:
    """What a run that ends while it measures leaves in its folder, so that not every start ends there.

    Process 0 has it.
    """

    def __init__(self, folder: Path, key: str):
        """Raises OSError."""
        self._path = folder / FILE
        try:
            before = _read(self._path)
        except ValueError:
            before = None
        self._starts = before.starts_ended if before is not None and before.step_key == key else 0
        self._own = KeptProfile(key, None, self._starts + 1)
        self._own.write(folder, {})

    def finish(self) -> None:
        """Take this start back, unless the run has kept what it measured. Raises OSError."""
        if _read(self._path) != self._own:
            return
        if self._starts:
            self._own._replace(starts_ended=self._starts).write(self._path.parent, {})
        else:
            self._path.unlink()


def check_profile_steps(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if `schedule.profile_steps` is set for devices whose compiler reads no profile."""
    steps, platform = config.schedule.profile_steps, mesh.devices.flat[0].platform
    if steps and platform not in _PLATFORMS:
        raise ConfigError(
            f"schedule.profile_steps={steps} is for GPUs, and these devices are {platform}: "
            "use schedule.profile_steps=0"
        )
    if steps and has_profile({}):
        raise ConfigError(
            f"schedule.profile_steps={steps} measures a profile, and XLA_FLAGS names the file of one: drop one of them"
        )


def step_key(program: StepProgram) -> str:
    """What a profile belongs to: the program, and all that changes the names and times of its instructions."""
    return hashlib.sha256(repr((program.fingerprint, compiler_environment())).encode()).hexdigest()[:16]


def kept_profile(folder: Path, key: str) -> KeptProfile | None:
    """The profile of the run in `folder` for the step with this key, the same on all processes; None without one.

    All processes call it. Process 0 prints what it finds.
    """
    kept = None
    if is_main_process():
        kept, message = _find(folder / FILE, key)
        if message:
            print(shown(message), flush=True)
    kept = from_process(0, kept)
    return None if kept is None else KeptProfile(*kept)


def _find(path: Path, key: str) -> tuple[KeptProfile | None, str]:
    """The profile in a file, if it is of this program, and a message."""
    try:
        kept = _read(path)
    except (OSError, ValueError) as error:
        return None, f"warning: {path} is invalid ({error}): the step is measured again"
    if kept is None:
        return None, ""
    if kept.step_key != key:
        return None, f"{path} is of another program: the step is measured again"
    if kept.starts_ended:
        what = f"{path}: starts that ended while they measured the step: {kept.starts_ended}"
        if kept.starts_ended < _MOST_STARTS:
            return None, f"{what}; the step is measured again"
        return kept, f"{what}; the step is compiled by estimated times: remove the file to measure again"
    if kept.profile is None:
        return kept, f"{path}: the step was slower by measured times, so it is compiled by estimated ones"
    return kept, f"the step is compiled by the measured times in {path}"


def _read(path: Path) -> KeptProfile | None:
    if not path.exists():
        return None
    content = read_json(path, _MOST_BYTES)
    if not isinstance(content, dict) or not isinstance(content.get("step_key"), str):
        raise ValueError("it names no program")
    profile = content.get("profile")
    if profile is not None and not (isinstance(profile, str) and is_profile(profile)):
        raise ValueError("its profile has other lines than times of instructions")
    starts = content.get("starts_ended", 0)
    if type(starts) is not int:
        raise ValueError("it counts no starts")
    return KeptProfile(content["step_key"], profile, starts)
