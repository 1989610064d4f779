"""Do the hops of a ring overlap with experts on real compilers? python profiling/ring_hlo.py TARGET

Compiles experts with their dispatch and their combine, ahead of time and without the hardware: with a whole exchange
before and after them, and hop by hop, as a plain step does with `exchange.algorithm=ring`. Counts, in the scheduled
programs, the hops that are asynchronous and those with a matrix product between start and done; an estimate by
published rates gives their hidden share. Targets as in docs/compiled.md: h100:1x1x8, v5p:2x2x2. Takes seconds for each
program. Writes results/ring_hlo_TARGET.json; exit code 1 unless hops hide more than whole exchanges do.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from real_compiler import compile_on, read_command, row_dtype
from results_file import rounded, write_result

from moe_jax import config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import HloModule
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import Target, target_devices
from moe_jax.models.dispatch import TokenExchange, dispatch_compute_combine
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.models.hooks import hooks_of
from moe_jax.models.moe import run_experts
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.parallel.tensor_dispatch import DispatchRoute

_SIZES = ("experts", "slots", "width", "hidden")
Layer = Callable[[Any, jax.Array], jax.Array]  # of experts' matrices, and rows [P, experts, slots, width] of P ranks


def layers(ranks: Ranks, moe: config.MoEConfig) -> dict[str, Layer]:
    """Return each implementation of dispatch, experts and combine."""
    product, hooks = next(iter(GROUPED_PRODUCTS[ranks.platform].values())), hooks_of(moe)
    experts = partial(run_experts, moe=moe, product=product)

    def whole(algorithm: str) -> Layer:
        route = DispatchRoute(algorithm, ranks)
        dispatch, combine = TokenExchange("dispatch", route, hooks), TokenExchange("combine", route, hooks)

        def layer(params: Any, rows: jax.Array) -> jax.Array:
            return combine.run(ExpertRows(experts(params, dispatch.run(ExpertRows(rows))))).rows

        return layer

    def hop_by_hop(params: Any, rows: jax.Array) -> jax.Array:
        return dispatch_compute_combine(ExpertRows(rows), partial(experts, params), DispatchRoute("ring", ranks), moe)

    return {"flat": whole("flat"), "ring": whole("ring"), "hop by hop": hop_by_hop}


def compile_layer(layer: Layer, mesh: jax.sharding.Mesh, platform: str, sizes: argparse.Namespace) -> HloModule:
    """Compile a program that computes rows, sends them through the layer, and computes with the result."""
    dtype, sharding = row_dtype(platform), NamedSharding(mesh, BATCH_SPEC)
    experts = mesh.size * sizes.experts
    shapes = {
        "rows": (mesh.size**2, sizes.experts, sizes.slots, sizes.width),
        "gate": (experts, sizes.width, sizes.hidden),
        "up": (experts, sizes.width, sizes.hidden),
        "down": (experts, sizes.hidden, sizes.width),
    }
    params = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape in shapes.items()}
    rows = params.pop("rows")

    def body(params: Any, rows: jax.Array) -> jax.Array:
        return layer(params, 2 * rows) + 1

    return compile_on(mesh, platform, body, BATCH_SPEC, params, rows)


def study(program: HloModule, target: Target, devices: int) -> dict[str, Any]:
    """Describe one implementation."""
    run = replay(program, target, devices)
    return {
        "transfers": len(run.collectives),
        "asynchronous": sum(each.is_async for each in run.collectives),
        "beside_a_product": sum(each.inside_products > 0 for each in run.collectives),
        "estimated_ms": rounded(1e3 * run.step_s),
        "communication_ms": rounded(1e3 * run.communication_s),
        "hidden": rounded(run.hidden_s / run.communication_s),
    }


def main() -> None:
    """Read the command line, compile and describe every implementation, write the result."""
    parser = CommandParser(prog="python profiling/ring_hlo.py", description=__doc__)
    parser.add_argument("--experts", type=int, default=4, help="of a rank (default %(default)s)")
    parser.add_argument("--slots", type=int, default=512, help="of a rank's rows for an expert (default %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="of a row (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=1408, help="width of an expert (default %(default)s)")
    arguments, target = read_command(parser, _SIZES)
    devices = target_devices(target)
    mesh = make_mesh(config.MeshConfig(data=1, expert=len(devices)), devices)
    ranks, moe = Ranks(Axis.EXPERT, target.platform), config.MoEConfig(num_experts=mesh.size * arguments.experts)
    ways = {
        name: study(compile_layer(layer, mesh, target.platform, arguments), target, mesh.size)
        for name, layer in layers(ranks, moe).items()
    }
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    write_result(f"ring_hlo_{target.name.replace(':', '_')}", {"ranks": mesh.size, **sizes, "ways": ways})
    if ways["hop by hop"]["hidden"] <= max(ways["flat"]["hidden"], ways["ring"]["hidden"]):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
