"""What node-aware exchanges become on real compilers: python profiling/exchange_hlo.py TARGET

Compiles one exchange of bfloat16 rows with each algorithm, ahead of time and without the hardware. Counts the bytes and
messages that leave a rank inside its node and between nodes in the scheduled program, and compares them with the closed
forms of plan/exchange.py. Targets as in docs/compiled.md: h100:1x2x8, h200:1x8x8, v5p:2x2x2, cpu:8. Takes seconds for
each algorithm. Writes results/exchange_hlo_TARGET.json; exit code 1 if anything differs.
"""

import itertools
from typing import Any

import jax
from jax.sharding import NamedSharding
from real_compiler import compile_on, read_command, row_dtype
from results_file import write_result

from moe_jax import config
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.measure.hlo import HloModule
from moe_jax.measure.targets import target_devices
from moe_jax.measure.traffic import ExchangeOp, by_phase, exchanges, side_by_side, traffic_of
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.ranks import Ranks, ranks_per_node
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.exchange import ALGORITHMS, Links, Phase, Traffic, exchange_seconds, steps_of, traffic


class NodeError(UserError):
    """Raised for ranks that do not divide into nodes."""


def compile_exchange(name: str, ranks: Ranks, mesh: jax.sharding.Mesh, x: jax.ShapeDtypeStruct) -> HloModule:
    """Compile a program that computes rows, exchanges them and computes with the result."""

    def body(x: jax.Array) -> jax.Array:
        return EXCHANGES[name](2 * x, ranks) + 1

    return compile_on(mesh, ranks.platform, body, BATCH_SPEC, x)


def describe(found: list[ExchangeOp], forms: list[Phase], num_ranks: int, per_node: int) -> dict[str, Any]:
    """Describe a phase: its collectives, the traffic of ranks, and whether it equals the closed form on every rank."""
    counted = traffic_of(found, num_ranks, per_node)
    leader, member = as_numbers(counted[0]), as_numbers(counted[-1])
    groups = " ".join(str(list(group)).replace(" ", "") for group in found[0].groups[:3])
    return {
        "collectives": len(found),
        "asynchronous": sum(each.is_async for each in found),
        "groups": groups + (" ..." if len(found[0].groups) > 3 else ""),
        **({"each_rank_sends": leader} if leader == member else {"leader_sends": leader, "member_sends": member}),
        "is_closed_form": counted == [traffic(forms, leader=rank % per_node == 0) for rank in range(num_ranks)],
    }


def as_numbers(sent: Traffic) -> str:
    """Format a number of messages and bytes."""
    texts = [
        f"{messages} messages of {num_bytes / messages:.0f} bytes {link}"
        for link, (messages, num_bytes) in sent._asdict().items()
        if messages
    ]
    return ", ".join(texts) or "nothing"


def study(name: str, ranks: Ranks, mesh: jax.sharding.Mesh, x: jax.ShapeDtypeStruct, links: Links) -> dict[str, Any]:
    """Compile and check one algorithm."""
    program, num_bytes = compile_exchange(name, ranks, mesh, x), x.size * x.dtype.itemsize // mesh.size
    steps = steps_of(name, num_bytes, mesh.size // ranks.per_node, ranks.per_node)
    phases = by_phase(exchanges(program, mesh.size), steps)
    forms = {phase: [form for form in itertools.chain(*steps) if form.name == phase] for phase in phases}
    seconds = exchange_seconds(name, num_bytes, mesh.size // ranks.per_node, ranks.per_node, links)
    result: dict[str, Any] = {
        "closed_form_us": round(1e6 * seconds, 1),
        "phases": {phase: describe(phases[phase], forms[phase], mesh.size, ranks.per_node) for phase in phases},
    }
    if {"own", "between"} <= phases.keys():
        result["own_and_between_side_by_side"] = side_by_side(phases["own"], phases["between"])
    return result


def main() -> None:
    """Read the command line, check every algorithm, write the result."""
    parser = CommandParser(prog="python profiling/exchange_hlo.py", description=__doc__)
    parser.add_argument("--per-node", type=int, help="ranks per node (default: as the devices report)")
    parser.add_argument("--rows", type=int, default=64, help="for each pair of ranks (default 64)")
    parser.add_argument("--width", type=int, default=1024, help="of a row (default 1024)")
    arguments, target = read_command(parser, ("per_node", "rows", "width"))
    devices = target_devices(target)
    mesh = make_mesh(config.MeshConfig(data=1, expert=len(devices)), devices)
    per_node = arguments.per_node or ranks_per_node(mesh.devices, mesh.axis_names.index(Axis.EXPERT))
    if mesh.size % per_node:
        raise NodeError(f"--per-node={per_node} does not divide {mesh.size} devices: use a divisor")
    ranks = Ranks(Axis.EXPERT, target.platform, per_node)
    links = Links(inside=target.link, between=target.network)  # by published rates
    shape, sharding = (mesh.size**2, arguments.rows, arguments.width), NamedSharding(mesh, BATCH_SPEC)
    x = jax.ShapeDtypeStruct(shape, row_dtype(target.platform), sharding=sharding)
    algorithms = {name: study(name, ranks, mesh, x, links) for name in ALGORITHMS}
    values = {
        "nodes": mesh.size // per_node,
        "ranks_per_node": per_node,
        "bytes_of_a_rank": x.size * x.dtype.itemsize // mesh.size,
    }
    write_result(f"exchange_hlo_{target.name.replace(':', '_')}", {**values, "algorithms": algorithms})
    phases = [phase for result in algorithms.values() for phase in result["phases"].values()]
    if not all(phase["is_closed_form"] for phase in phases):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
