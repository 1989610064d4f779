"""Processes that have joined, and have connected what listens in a run, until they are told to end."""

import argparse
import os
import signal
import sys
import time

import jax
from jax.experimental import multihost_utils

from moe_jax.parallel.post import Post
from moe_jax.train.processes import add_arguments, initialize, options_from

parser = argparse.ArgumentParser()
add_arguments(parser)
arguments = parser.parse_args()
initialize(options_from(arguments), arguments.num_processes)
post = Post(tuple(device.process_index for device in jax.devices()))
multihost_utils.sync_global_devices("all have connected")
signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # jax's own handler waits for a step
sys.stderr.write(f"rank {arguments.process_id} runs as {os.getpid()}\n")
sys.stderr.flush()
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep does not end it
