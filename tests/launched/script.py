"""A process without jax that acts out one role: `script.py ROLE --coordinator … --num-processes N --process-id I`."""

import os
import signal
import subprocess
import sys
import time

role, rank = sys.argv[1], int(sys.argv[-1])


def say(text: str) -> None:
    """One line on stderr in one write: unbuffered, print writes a line's end apart, and others write in between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def leave(*_: object) -> None:
    say(f"rank {rank} saved")
    sys.exit(0)


if role == "arguments":
    print(" ".join(sys.argv[2:]))
    say("a line for stderr")
elif role == "bad-input":
    time.sleep(0.1 * (2 - rank))  # process 0 is the last to tell
    say("error: train.steps=0 must be at least 1")
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
    say(f"rank {rank} runs as {os.getpid()}")
    for _ in range(600):  # a signal that comes just before a sleep does not end it
        time.sleep(0.1)
elif role == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "60"])
    say(f"rank {rank} runs as {os.getpid()} {helper.pid}")
    time.sleep(60)
