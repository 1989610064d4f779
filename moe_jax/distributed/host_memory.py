"""The treatment of freed host memory by the C library's allocator."""

import ctypes
from contextlib import suppress

# parameters of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed_memory() -> None:
    """Reuse freed memory for later allocations instead of returning it to the kernel. Call it before starting threads.

    XLA:CPU allocates a step's temporary memory again for each step, and the kernel would clear all its pages, with one
    page fault each. As the arenas of other threads cannot have blocks of more than 64 MiB, all threads share one arena.
    With another C library nothing changes.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
            mallopt(parameter, value)
