"""Memory that one step has freed is the next one's, without the kernel clearing it again."""

import subprocess
import sys

FAULTS_OF_BLOCKS = """
import ctypes, resource, sys, threading
from moe_jax.distributed.host_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_memory()

def use():
    block = libc.malloc(100 * 2**20)
    libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(100 * 2**20))
    libc.free(block)

def in_thread():
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

in_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    in_thread()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_large_blocks_of_threads_are_cleared_once():
    def faults(kind):
        command = [sys.executable, "-c", FAULTS_OF_BLOCKS, kind]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < faults("returned") / 4
