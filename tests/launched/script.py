"""A process without jax that acts out one role: `script.py ROLE … --coordinator … --num-processes N --process-id I`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moe_jax.distributed.heartbeat import report_no_mesh, report_progress

role, rank = sys.argv[1], int(sys.argv[-1])


def log(text: str) -> None:
    """One line on stderr in one write: unbuffered, print writes a line's end apart, and others write in between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def leave(*_: object) -> None:
    log(f"rank {rank} saved")
    sys.exit(0)


if role == "arguments":
    print(" ".join(sys.argv[2:]))
    log("a line for stderr")
elif role == "bad-input":
    time.sleep(0.1 * (2 - rank))  # process 0 is the last to report
    log("error: train.steps=0 must be at least 1")
    sys.exit(2)
elif role == "one-fails":
    if rank == 1:
        sys.exit(7)
    time.sleep(60)
elif role == "one-crashes":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif role == "one-is-asked-to-end":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
elif role == "saves-on-sigterm":
    signal.signal(signal.SIGTERM, leave)
    log(f"rank {rank} runs as {os.getpid()}")
    for _ in range(600):  # a signal that comes just before a sleep does not end it
        time.sleep(0.1)
elif role == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "60"])
    log(f"rank {rank} runs as {os.getpid()} {helper.pid}")
    time.sleep(60)
elif role == "has-a-broken-place":  # the second; and no mesh of other than 1, 2 or 4 processes
    log(f"rank {rank} in place {os.environ['JAX_LOCAL_DEVICE_IDS']}")
    if int(sys.argv[sys.argv.index("--num-processes") + 1]) == 3:
        log("error: nothing trains on cpux3")
        report_no_mesh()
        sys.exit(2)
    if os.environ["JAX_LOCAL_DEVICE_IDS"] == "1":
        sys.exit(7)
    if "4" in sys.argv:  # others wait
        time.sleep(60)
elif role == "is-wrong-without-one":  # the second of two is broken, and what the other one then finds is no mesh
    if "1" in (os.environ["JAX_LOCAL_DEVICE_IDS"], sys.argv[sys.argv.index("--num-processes") + 1]):
        log("error: data.path=x is missing")
        sys.exit(2 if os.environ["JAX_LOCAL_DEVICE_IDS"] == "0" else 7)
    time.sleep(60)
elif role == "is-broken-for-a-while":  # FILE: the second place, until the first, alone, has made a step and fails
    mended, alone = Path(sys.argv[2]), sys.argv[sys.argv.index("--num-processes") + 1] == "1"
    if os.environ["JAX_LOCAL_DEVICE_IDS"] == "1" and not mended.exists():
        sys.exit(7)
    if alone:
        report_progress(1)
        mended.touch()
        sys.exit(8)
    time.sleep(0 if mended.exists() else 60)
elif role == "goes-back":  # and takes its time
    for step in (0, 1, 2, 3, 1):
        report_progress(step)
    time.sleep(2)
elif rank == 0:  # of the roles below: continues until process 1 is done
    done = Path(f"{sys.argv[2]}.done")
    for _ in range(600):
        report_progress(0)
        if done.exists():
            break
        time.sleep(0.1)
elif role == "trains":  # FILE STEP…: at each start it reaches the next of these steps, and fails; then it ends
    starts = Path(sys.argv[2])
    before = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (before + 1))
    reaches = [int(text) for text in sys.argv[3 : sys.argv.index("--coordinator")]]
    if before < len(reaches):
        for step in range(reaches[before] + 1):
            report_progress(step)
        sys.exit(7)
    Path(f"{starts}.done").touch()
elif role == "hangs":  # FILE HOW: the first time, after step 3
    started = Path(sys.argv[2])
    report_progress(0)
    if started.exists():
        Path(f"{started}.done").touch()
        sys.exit(0)
    started.touch()
    log(f"rank {rank} runs as {os.getpid()}")
    for step in range(600):
        if step < 4 or sys.argv[3] != "silently":
            report_progress(step)
        time.sleep(0.1)
