"""Process 1 fails, as told, while the others wait for it in a collective."""

import argparse

from jax.experimental import multihost_utils

from moe_jax.errors import ConfigError, run_command
from moe_jax.train.processes import add_arguments, fail_fast, initialize, options_from

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=("bug", "bad-input"))
add_arguments(parser)
arguments = parser.parse_args()


def main() -> None:
    initialize(options_from(arguments), arguments.num_processes)
    with fail_fast():
        multihost_utils.sync_global_devices("all have started")
        if arguments.process_id == 1:
            raise ConfigError("data.path=x is missing here") if arguments.how == "bad-input" else ValueError("a bug")
        multihost_utils.sync_global_devices("process 1 never comes")


run_command(main)
