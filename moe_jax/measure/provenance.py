"""Record the provenance of results: hardware, versions, date and command, stored next to every result."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PROVENANCE = "provenance.json"  # in a run's folder; it has the run's ID
STEP_PROGRAM = "step_program"  # in a run's provenance.json: the fingerprint of its step

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def provenance() -> dict[str, Any]:
    """Return the provenance, with devices, as plain values for JSON."""
    import jax

    device = jax.devices()[0]
    return origin() | {
        "devices": f"{jax.device_count()} × {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
    }


def origin() -> dict[str, Any]:
    """Return the provenance without devices; this does not initialize jax."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"{_program()} {shlex.join(map(_argument, sys.argv[1:]))}".strip(),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        **versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version()} | {name: package_version(name) for name in _PACKAGES}


def _program() -> str:
    """Return the program as typed: `python -m moe_jax.train` or `python profiling/bench_step.py`, without absolute
    paths.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return f"python {os.path.relpath(sys.argv[0])}" if sys.argv[0] else "python"


def _argument(text: str) -> str:
    """Return an argument; of an absolute path only the last part, since the rest is of one machine."""
    return Path(text).name if Path(text).is_absolute() else text


def package_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the git commit, marked dirty if tracked files differ from it; results, which commands write, do
    not count.
    """
    git = ["git", "-C", str(Path(__file__).parents[2])]
    try:
        head = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":(exclude)profiling/results"]).returncode
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return None
    return f"{head}-dirty" if changed else head
