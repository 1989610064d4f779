"""Memory that XLA:TPU allocates for the temporaries of a program, read off its dump.

`memory_analysis()` counts a part of it twice: it adds what the compiler calls fragmentation to an allocation that
contains it. The compiler rejects a program by the allocation alone, as its message for one that does not fit shows
("HLO temp 2.26G (… 21.1% fragmentation (487.12M))" is an allocation of 2.26 GiB; `memory_analysis()` says 2.73 GiB).
The dump of the buffer assignment has the allocation.
"""

import re
from pathlib import Path

from moe_jax.schedule.xla_flags import Value

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:color 0, )?preallocated-temp", re.MULTILINE)  # not on-chip


def dump_options(folder: str) -> dict[str, Value]:
    """Compiler options that write the dump to a folder, and change no program."""
    return {"xla_dump_to": folder}


def allocated_temporaries(folder: Path) -> int | None:
    """Bytes of temporaries in a device's main memory, of the program that was dumped last; None without a dump."""
    dumps = list(folder.glob("*buffer-assignment.txt"))
    if not dumps:
        return None
    last = max(dumps, key=lambda path: path.stat().st_mtime)
    return sum(map(int, _ALLOCATION.findall(last.read_text(encoding="utf-8"))))
