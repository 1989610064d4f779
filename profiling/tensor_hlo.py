"""What exchanges over tensor ranks become on real compilers: python profiling/tensor_hlo.py TARGET [--tensor T]

Compiles the dispatch of rows to the experts with each form (`exchange.tensor_form`), ahead of time and without the
hardware. Counts the bytes that leave a device in all-to-alls and in gathers, and reports whether one chunk is gathered
while the next is exchanged. Targets as in docs/compiled.md: h100:1x1x8, v5p:2x2x2, cpu:8. Takes seconds for each form.
Writes results/tensor_hlo_TARGET_tT.json; exit code 1 if bytes are not those of plan/over_tensor.py.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from real_compiler import compile_on, read_command, row_dtype
from results_file import write_result

from moe_jax import config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.costs import sent_bytes
from moe_jax.measure.hlo import HloModule
from moe_jax.measure.targets import target_devices
from moe_jax.measure.traffic import ExchangeOp, exchanges, side_by_side
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.tensor_dispatch import FORMS, DispatchRoute
from moe_jax.plan.over_tensor import LinkStages, stage_seconds

_SPEC = PartitionSpec((Axis.EXPERT, Axis.TENSOR))


def compile_form(route: DispatchRoute, mesh: jax.sharding.Mesh, rows: int, width: int) -> HloModule:
    """Compile a program that computes rows, sends them to the experts, and computes with the result."""

    def body(x: jax.Array) -> jax.Array:
        send = EXCHANGES[route.algorithm].bind(route.ranks)
        return route.all_to_all(2 * x, send, to_experts=True) + 1

    shape, dtype = (mesh.size * mesh.shape[Axis.EXPERT], rows, width), row_dtype(route.ranks.platform)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _SPEC))
    return compile_on(mesh, route.ranks.platform, body, _SPEC, x)


def with_kind(found: list[ExchangeOp], kind: str) -> list[ExchangeOp]:
    return [each for each in found if each.collective.opcode.startswith(kind)]


def study(form: str, program: HloModule, num_bytes: float, tensor: int, experts: int) -> dict[str, Any]:
    """Describe one form; `num_bytes` is the total of all tensor ranks of an expert rank."""
    devices = tensor * experts
    found = exchanges(program, devices)
    sends, gathers = with_kind(found, "all-to-all"), with_kind(found, "all-gather")
    sent = sum(sent_bytes(each.collective, program, devices) for each in sends)
    only_bytes = LinkStages(*(lambda x: x,) * 3)
    expected = stage_seconds(num_bytes, tensor, experts, 1, only_bytes)[0] * (tensor if form == "replicated" else 1)
    return {
        "all_to_alls": len(sends),
        "asynchronous": sum(each.is_async for each in sends),
        "bytes_of_a_device": sent,
        "is_closed_form": abs(sent - expected) < 1,
        "gathers": len(gathers),
        "gathered_while_another_chunk_is_exchanged": side_by_side(gathers, sends),
    }


def main() -> None:
    """Read the command line, compile and describe every form, write the result."""
    parser = CommandParser(prog="python profiling/tensor_hlo.py", description=__doc__)
    parser.add_argument("--tensor", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--chunks", type=int, default=4, help="of the chunked forms (default 4)")
    parser.add_argument("--rows", type=int, default=4096, help="of a device for each expert rank (default 4096)")
    parser.add_argument("--width", type=int, default=2048, help="of a row (default 2048)")
    arguments, target = read_command(parser, ("tensor", "chunks", "rows", "width"))
    devices = target_devices(target)
    mesh = make_mesh(config.MeshConfig(data=1, expert=-1, tensor=arguments.tensor), devices)
    experts, itemsize = mesh.shape[Axis.EXPERT], row_dtype(target.platform).itemsize
    num_bytes = arguments.tensor * experts * arguments.rows * arguments.width * itemsize
    forms = {}
    for name in FORMS:
        route = DispatchRoute("flat", Ranks(Axis.EXPERT, target.platform), name, arguments.chunks)
        program = compile_form(route, mesh, arguments.rows, arguments.width)
        forms[name] = study(name, program, num_bytes, arguments.tensor, experts)
    values = {"tensor_ranks": arguments.tensor, "expert_ranks": experts, "chunks": arguments.chunks, "forms": forms}
    write_result(f"tensor_hlo_{target.name.replace(':', '_')}_t{arguments.tensor}", values)
    if not all(form["is_closed_form"] for form in forms.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
