"""What comes after the processes have joined: a failure of process 1, for which the others wait in a collective, or of
all; a signal to process 1 long before the first step; or nothing more, in a context that handles signals.
"""

import argparse
import os
import signal
import time

from jax.experimental import multihost_utils

from moe_jax.distributed.failures import fail_fast
from moe_jax.distributed.interrupt import stop_on_signals
from moe_jax.distributed.processes import add_arguments, initialize, options_from
from moe_jax.errors import ConfigError, run_command

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=("bug", "bad-input", "bad-input-of-all", "killed", "signalled", "waits"))
add_arguments(parser)
arguments = parser.parse_args()


def main() -> None:
    initialize(options_from(arguments), arguments.num_processes)
    with fail_fast():
        multihost_utils.sync_global_devices("all have started")
        if arguments.how == "bad-input-of-all" or (arguments.how == "bad-input" and arguments.process_id == 1):
            raise ConfigError("data.path=x is missing")
        if arguments.how == "killed" and arguments.process_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments.how == "bug" and arguments.process_id == 1:
            raise ValueError("a bug")
        if arguments.how == "signalled":
            if arguments.process_id == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)  # enough to agree on when to stop
        with stop_on_signals() as stop:
            while arguments.how == "signalled":
                multihost_utils.sync_global_devices("a step")
                if stop.reached():
                    return
            print("waits", flush=True)
            if arguments.process_id == 1:
                time.sleep(60)
            multihost_utils.sync_global_devices("process 1 never comes")


run_command(main)
