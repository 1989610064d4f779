"""The command that measures a cluster profile: the speed of links, matrix products, attention and copies.

python -m moe_jax.measure
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config.ranges import CLUSTER, SIMULATED, Range, check_number
from moe_jax.distributed import processes
from moe_jax.distributed.failures import fail_fast
from moe_jax.distributed.hosts import hosts
from moe_jax.errors import CommandParser, run_command
from moe_jax.files.atomic import check_writable
from moe_jax.files.local_copy import upload
from moe_jax.files.places import output_file, place
from moe_jax.measure.microbench import compile_all, curves_of, memory_bytes, times_of
from moe_jax.measure.operations import KINDS, Machine, groups_of, operations, sizes_for
from moe_jax.measure.provenance import provenance
from moe_jax.parallel.ranks import ranks_per_node
from moe_jax.paths import shown
from moe_jax.plan.clusters.measured import ClusterProfile, ProfileError, write_profile
from moe_jax.report.plots import PlotError
from moe_jax.report.profile import draw_profile, table


def main() -> None:
    """Parse the command line, measure, and write the profile and its plot."""
    parser = CommandParser(
        prog="python -m moe_jax.measure",
        description="Measure collectives, matrix products, attention and copies on all devices, and write a cluster "
        "profile (JSON) and a plot (PNG next to it).",
        epilog="Examples: --out profiles/v5p.json; on eight simulated devices, in a minute: --cpu-devices 8 --quick",
    )
    parser.add_argument("--out", type=place, default="cluster_profile.json", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few small sizes and rounds: seconds, not minutes")
    parser.add_argument("--only", metavar="A,B", default=",".join(KINDS), help="of %(default)s (default: all)")
    parser.add_argument("--rounds", type=int, help="timed runs of everything, interleaved (default: 15; quick: 3)")
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="simulate this many devices on the CPU")
    parser.add_argument(
        "--node-devices",
        type=int,
        metavar="N",
        help="neighbours joined by fast links (default: detected)",
    )
    processes.add_arguments(parser)
    arguments = parser.parse_args()
    kinds = arguments.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ProfileError(f"--only={unknown[0]} is unknown: choose of {', '.join(KINDS)}")
    rounds = (3 if arguments.quick else 15) if arguments.rounds is None else arguments.rounds
    check_number("--rounds", rounds, Range(1, 10_000))
    check_number("--cpu-devices", arguments.cpu_devices, SIMULATED)
    check_number("--node-devices", arguments.node_devices, CLUSTER)
    arguments.out = output_file(arguments.out)
    if arguments.out.suffix != ".json" or arguments.out.is_dir():
        raise ProfileError(f"--out={arguments.out} must be a file that ends in .json, e.g. cluster_profile.json")
    processes.initialize(processes.options_from(arguments), arguments.cpu_devices)
    with fail_fast():
        if processes.is_main_process():
            check_writable(arguments.out, arguments.out.with_suffix(".png"))  # before the measurement takes minutes
        profile = measure(kinds, arguments.quick, rounds, arguments.node_devices)
        if processes.is_main_process():
            _write(profile, arguments.out)


def measure(kinds: list[str], quick: bool, rounds: int, node_devices: int | None) -> ClusterProfile:
    """Measure all curves. Every process must call it. Raises ProfileError."""
    platform = jax.devices()[0].platform
    if node_devices is None:
        node_devices = ranks_per_node(np.array(jax.devices()), 0, hosts=hosts())
    if jax.device_count() % node_devices:
        raise ProfileError(
            f"--node-devices={node_devices} does not divide the {jax.device_count()} devices: use {_divisors()}"
        )
    machine = Machine(platform, node_devices)
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    groups = groups_of(jax.device_count())
    programs = compile_all(operations(kinds, sizes_for(platform, quick), groups, machine, dtype), dtype)
    if not programs:
        raise ProfileError("--only=collectives has nothing to measure on one device: add others, or --cpu-devices")
    _print_once(f"{len(programs)} programs compiled")
    times = times_of(programs, dtype, rounds, 1e-3 if quick else 2e-2, _print_once)
    return ClusterProfile(
        platform=platform,
        devices=jax.device_count(),
        processes=jax.process_count(),
        node_devices=node_devices,
        curves=curves_of([program.operation for program in programs], times),
        provenance=provenance(),
        memory_bytes=memory_bytes(jax.local_devices()),
    )


def _divisors() -> str:
    count = jax.device_count()
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def _print_once(line: str) -> None:
    """Print a line in the main process."""
    if processes.is_main_process():
        print(line, flush=True)


def _write(profile: ClusterProfile, path: Path) -> None:
    write_profile(path, profile)
    print(table(profile))
    print(f"written: {shown(str(path))}")
    try:
        draw_profile(profile, path.with_suffix(".png"))
        print(f"written: {shown(str(path.with_suffix('.png')))}")
    except PlotError as error:
        print(f"no plot: {error}")
    upload(path.parent)


if __name__ == "__main__":
    run_command(main)
