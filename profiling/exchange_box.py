"""All-to-all algorithms between two nodes in one box.

    sudo .venv/bin/python profiling/exchange_box.py

There are two nodes of two processes, with fast links inside and one slow link out of each node. All-to-alls of every
algorithm over the four processes, and collectives inside a node and between nodes, alternate at sizes from 64 kB to 4
MB. The table shows which algorithm is chosen by lines fitted to its times, and which was the fastest. Next to the times
it shows the predictions of closed forms, based on lines fitted to collectives inside a node and between nodes. Links
are slow, so that the compute of four processes on the machine's cores matters little.
"""

import argparse
import dataclasses
from typing import Any

import box
import jax.numpy as jnp
from benchmark_harness import print_once
from count_argument import check_least
from exchange_summary import NODES, RANKS_PER_NODE, summary, table, write_picture
from results_file import RESULTS, write_result

from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.microbench import compile_all, curves_of, times_of
from moe_jax.measure.operations import CommGroup, Machine, collectives
from moe_jax.plan.curves import Curve

GROUPS = (CommGroup(RANKS_PER_NODE, 1), CommGroup(NODES, RANKS_PER_NODE), CommGroup(NODES * RANKS_PER_NODE, 1))
_LOCAL_BURST_KB = 64  # a fast link needs a burst, or it is idle until its timer fires
_LOCAL_QUEUE = "limit 64mb"  # no loss
_BUFFER_BYTES = 2**25  # of a socket: large enough for any message
_SMALLEST = 16
_ROUND_S = 0.2  # of a round of small messages: long compared with the free burst of a link after a pause


def measure(arguments: argparse.Namespace) -> None:
    """Run all rounds, in one process of the box."""
    box.set_buffers(_BUFFER_BYTES)
    box.join()
    box.set_rate(box.parse_rate(arguments.local_rate), _LOCAL_BURST_KB, _LOCAL_QUEUE)
    dtype = jnp.dtype(jnp.float32)
    machine = Machine("cpu", node_devices=RANKS_PER_NODE)
    sizes = [2**n for n in range(_SMALLEST, arguments.largest + 1)]
    operations = (
        each for group in GROUPS for num_bytes in sizes for each in collectives(group, num_bytes, machine, dtype)
    )
    programs = compile_all(operations, dtype)
    print_once(f"{len(programs)} programs compiled")
    times = times_of(programs, dtype, arguments.rounds, _ROUND_S, print_once)
    box.return_values([dataclasses.asdict(curve) for curve in curves_of([each.operation for each in programs], times)])


def main() -> None:
    """Run the box, print the table, and write JSON and a picture to results/."""
    parser = CommandParser(prog="python profiling/exchange_box.py", description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="out of each node (default: %(default)s)")
    parser.add_argument("--local-rate", default="400mbit", help="out of each process (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--largest", type=int, default=22, metavar="N", help="size, 2^N bytes (default: %(default)s)")
    parser.add_argument("--name", default="exchange_box", help="of the files in results/")
    box.add_arguments(parser)
    parser.set_defaults(processes=NODES * RANKS_PER_NODE)
    arguments = parser.parse_args()
    check_least(arguments, rounds=1)
    if not _SMALLEST < arguments.largest <= 28:
        raise ConfigError(f"--largest={arguments.largest} must be {_SMALLEST + 1}..28")
    if arguments.processes != NODES * RANKS_PER_NODE:
        raise ConfigError(
            f"--processes={arguments.processes}: this needs {NODES} nodes of {RANKS_PER_NODE}, leave it out"
        )
    box.parse_rate(arguments.local_rate, "--local-rate")
    rate = box.parse_rate(arguments.rate)
    if box.rank() is not None:
        measure(arguments)
        return
    settings = box.box_from(arguments, ranks_per_node=RANKS_PER_NODE, node_bits_per_s=rate)
    found: list[dict[str, Any]] = box.run_in_box(settings)
    result = summary([Curve(**curve) for curve in found])
    print(table(result))
    print(f"written: {write_picture(result, RESULTS / f'{arguments.name}.png')}")
    write_result(arguments.name, result | {"box": dataclasses.asdict(settings), "local_rate": arguments.local_rate})


if __name__ == "__main__":
    run_command(main)
