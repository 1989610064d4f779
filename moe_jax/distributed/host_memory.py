"""What a process does with memory of the host that was freed."""

import ctypes
from contextlib import suppress

# of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed_memory() -> None:
    """Keep it for whoever allocates next, instead of giving it back to the kernel; call it before threads are started.

    XLA:CPU allocates a step's temporary memory anew for each step, and the kernel would clear all its pages, one fault
    each. Arenas of other threads hold no block of more than 64 MiB, so there is one for all. With another C library
    nothing changes.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
            mallopt(parameter, value)
