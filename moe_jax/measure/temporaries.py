"""Memory that compilers allocate for the temporaries of a program. That of XLA:TPU is read off its dump.

There `memory_analysis()` counts a part of it twice: it adds what the compiler calls fragmentation to an allocation that
contains it. The compiler rejects a program by the allocation alone, as its message for one that does not fit shows
("HLO temp 2.26G (… 21.1% fragmentation (487.12M))" is an allocation of 2.26 GiB; `memory_analysis()` says 2.73 GiB).
The dump of the buffer assignment has the allocation.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax.stages import Compiled

from moe_jax.measure.hlo import HloError
from moe_jax.schedule.xla_flags import Value

_ALLOCATION = re.compile(
    r"^allocation \d+: size (\d+), (?:color (\d+), )?(?:page \d+, )?preallocated-temp", re.MULTILINE
)
_TEMPORARIES = re.compile(r"^allocation .*preallocated-temp", re.MULTILINE)
_MAIN_MEMORY = ("", "0")  # colors; others are memories on the chip
_FOLDER = "xla_dump_to"  # the compiler's option


class Temporaries(NamedTuple):
    """The temporaries of a program in a device's main memory."""

    num_bytes: int
    is_upper_bound: bool  # counts gaps twice: XLA:TPU wrote no dump, as when jax's compilation cache has the program


def compile_and_measure(
    compile_with: Callable[[Mapping[str, Value]], Compiled],
    platform: str,
    options: Mapping[str, Value] | None = None,
) -> tuple[Compiled, Temporaries]:
    """Compile a program, and return it with its temporaries.

    `compile_with` is called with further compiler options, which do not change the program. `options` are its own: if
    these ask for a dump, that one is read.
    """
    if platform != "tpu":
        program = compile_with({})
        return program, Temporaries(_reported(program), False)
    with tempfile.TemporaryDirectory() as own:
        folder = str((options or {}).get(_FOLDER, own))
        program = compile_with({_FOLDER: folder})
        found = allocated_temporaries(Path(folder))
    return program, Temporaries(_reported(program), True) if found is None else Temporaries(found, False)


def allocated_bytes(program: Compiled) -> int:
    """Return the bytes that a program takes on a device, with arguments and results; 0 if its compiler says nothing.

    Of XLA:TPU gaps between temporaries count twice, see above.
    """
    memory = program.memory_analysis()
    if memory is None:
        return 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)


def allocated_temporaries(folder: Path) -> int | None:
    """Return the bytes of temporaries in main memory, of the program dumped last; None without a dump.

    Raises HloError if a dump has another form.
    """
    dumps = list(folder.glob("*buffer-assignment.txt"))
    if not dumps:
        return None
    last = max(dumps, key=lambda path: path.stat().st_mtime)
    text = last.read_text(encoding="utf-8")
    allocations = _ALLOCATION.findall(text)
    if len(allocations) < len(_TEMPORARIES.findall(text)):
        raise HloError(
            f"{last.name} writes temporaries in an unknown form: use a version of libtpu that pyproject.toml allows"
        )
    return sum(int(size) for size, color in allocations if color in _MAIN_MEMORY)


def _reported(program: Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None, "every supported platform's compiler reports its memory"
    return int(memory.temp_size_in_bytes)
