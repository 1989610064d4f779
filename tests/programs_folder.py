"""Where compiled programs are kept between runs of the tests."""

import hashlib
from pathlib import Path


def programs_folder() -> Path:
    """One for each kind of processor: a program has the instructions of the one that compiled it."""
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = next((line for line in described.splitlines() if line.startswith(("flags", "Features"))), "")
    name = f"programs-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    return Path(__file__).parents[1] / ".pytest_cache" / "d" / name
