"""Processes that have joined, and have connected what listens in a run, until they are asked to end.

Meanwhile they meet again and again, and report it when they get SIGUSR1.
"""

import argparse
import os
import signal
import socket
import sys
import time

import jax
from jax.experimental import multihost_utils

from moe_jax.distributed.processes import add_arguments, initialize, options_from
from moe_jax.parallel import p2p_transport as post
from moe_jax.parallel.p2p_transport import P2PTransport

parser = argparse.ArgumentParser()
add_arguments(parser)
arguments = parser.parse_args()
initialize(options_from(arguments), arguments.num_processes)
call = post._connect_to


strangers: list[socket.socket] = []


def call_last(address: str, port: int, process: int) -> socket.socket:
    """Strangers call before: one is silent and stays."""
    for output in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(output)
    strangers.append(socket.create_connection((address, port)))
    return call(address, port, process)


post._connect_to = call_last
own = P2PTransport(tuple(device.process_index for device in jax.devices()))
multihost_utils.sync_global_devices("all have connected")
asked: list[int] = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # jax's own handler waits for a step


def log(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


log(f"rank {arguments.process_id} runs as {os.getpid()}")
while True:
    multihost_utils.sync_global_devices("a step")
    if asked:
        asked.clear()
        multihost_utils.sync_global_devices("a step")
        log(f"rank {arguments.process_id} is well")
    time.sleep(0.1)
