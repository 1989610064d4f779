"""A process without jax that acts out one role: `script.py ROLE --coordinator … --num-processes N --process-id I`."""

import os
import signal
import subprocess
import sys
import time

role, rank = sys.argv[1], int(sys.argv[-1])


def leave(*_: object) -> None:
    print(f"rank {rank} saved", file=sys.stderr, flush=True)
    sys.exit(0)


if role == "arguments":
    print(" ".join(sys.argv[2:]))
    print("a line for stderr", file=sys.stderr)
elif role == "bad-input":
    time.sleep(0.1 * (2 - rank))  # process 0 is the last to tell
    print("error: train.steps=0 must be at least 1", file=sys.stderr)
    sys.exit(2)
elif role == "one-fails":
    if rank == 1:
        sys.exit(7)
    time.sleep(60)
elif role == "one-crashes":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif role == "saves-on-sigterm":
    signal.signal(signal.SIGTERM, leave)
    print(f"rank {rank} runs as {os.getpid()}", file=sys.stderr, flush=True)
    time.sleep(60)
elif role == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "60"])
    print(f"rank {rank} runs as {os.getpid()} {helper.pid}", file=sys.stderr, flush=True)
    time.sleep(60)
