"""Which collectives overlap with matrix products on XLA:CPU? sudo .venv/bin/python profiling/overlap_probe.py

For every form of exchange and reduction and several sizes, alternates four programs: the collective alone; matrix
products of about the same time alone; both in one program without a dependency between them (`both`); and both in the
order of the training step (`in order`), with the products after the start of the collective and the use of its result
after the products. Runs with one and with two threads in XLA's pool, every process on one core. Takes about eight
minutes.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import box
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled
from results_file import write_result

from moe_jax import config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.parallel import background
from moe_jax.parallel.all_to_all import EXCHANGES, Exchange
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.reductions import REDUCTIONS, ReduceImpl
from moe_jax.parallel.sharding import BATCH_SPEC

MIB = 2**20
ROUNDS = 7
_WIDTH = 512


class Form(NamedTuple):
    """A collective of a flat vector [n], split into start and finish."""

    start: Callable[[jax.Array], tuple[Any, ...]]
    finish: Callable[[tuple[Any, ...]], jax.Array]


def forms(count: int) -> dict[str, Form]:
    """Return every exchange and reduction between this number of ranks, each a node of its own."""
    ranks = Ranks(Axis.EXPERT, "cpu")

    def form_of_exchange(exchange: Exchange) -> Form:
        return Form(
            lambda x: exchange.start(x.reshape(count, -1), ranks),
            lambda under_way: exchange.finish(under_way, ranks).ravel(),
        )

    def form_of_reduction(reduction: ReduceImpl) -> Form:
        return Form(lambda x: reduction.start(x, (Axis.EXPERT,)), reduction.finish)

    exchanges = {f"exchange {name}": form_of_exchange(exchange) for name, exchange in EXCHANGES.items()}
    return exchanges | {f"reduction {name}": form_of_reduction(reduction) for name, reduction in REDUCTIONS.items()}


def collective(x: jax.Array, form: Form) -> jax.Array:
    """Run a collective on a computed value, and compute with its result."""
    return form.finish(form.start(2 * x)) + 1


def both(x: jax.Array, h: jax.Array, form: Form, count: int) -> tuple[jax.Array, jax.Array]:
    """Run a collective and products that do not depend on each other."""
    return collective(x, form), products(h, count)


def in_order(x: jax.Array, h: jax.Array, form: Form, count: int) -> tuple[jax.Array, jax.Array]:
    """Run both with the products after the start in the background, and the use of the result after the products."""
    *others, last = form.start(2 * x)
    done = products(depend_on(h, last, "cpu") if last.ndim == 0 else h, count)
    return form.finish((*others, depend_on(last, done, "cpu"))) + 1, done


def products(h: jax.Array, count: int) -> jax.Array:
    """Compute a chain of `count` square products."""
    for _ in range(count):
        h = jnp.tanh(h @ h) + h
    return h


def compiled(mesh: Mesh, function: Callable[..., Any], *arguments: jax.Array) -> Compiled:
    """Compile `function` of per-device arrays as a program over the mesh."""
    on_mesh = jax.shard_map(function, mesh=mesh, in_specs=BATCH_SPEC, out_specs=BATCH_SPEC, check_vma=False)
    return jax.jit(on_mesh).lower(*arguments).compile()


def seconds(program: Compiled, *arguments: jax.Array) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start


def probe(mesh: Mesh, form: Form, size: int, product_s: float) -> dict[str, float]:
    """Return median seconds, and the hidden share of the shorter of the two."""
    ranks, sharding = mesh.size, NamedSharding(mesh, BATCH_SPEC)
    x = jax.device_put(jnp.ones(ranks * (size // 4 // ranks * ranks)), sharding)  # a whole block for every rank
    h = jax.device_put(jnp.zeros((ranks * _WIDTH, _WIDTH)), sharding)
    alone = compiled(mesh, functools.partial(collective, form=form), x)
    seconds(alone, x)
    wanted = max(1, round(statistics.median(seconds(alone, x) for _ in range(3)) / product_s))
    count = int(multihost_utils.broadcast_one_to_all(np.int32(wanted)))
    programs: dict[str, tuple[Any, ...]] = {
        "alone_s": (alone, x),
        "compute_s": (compiled(mesh, functools.partial(products, count=count), h), h),
        "both_s": (compiled(mesh, functools.partial(both, form=form, count=count), x, h), x, h),
        "in_order_s": (compiled(mesh, functools.partial(in_order, form=form, count=count), x, h), x, h),
    }
    runs: dict[str, list[float]] = {name: [] for name in programs}
    for round_index in range(ROUNDS + 1):
        for name, (program, *arguments) in programs.items():
            value = seconds(program, *arguments)
            if round_index:  # round 0 is the warm-up
                runs[name].append(value)
    result = {name: statistics.median(values) for name, values in runs.items()}
    total, shorter = result["alone_s"] + result["compute_s"], min(result["alone_s"], result["compute_s"])
    for name in ("both", "in_order"):
        result[f"{name}_hidden"] = (total - result[f"{name}_s"]) / shorter
    return {name: float(f"{value:.4g}") for name, value in result.items()}


def measure(arguments: argparse.Namespace) -> None:
    """Measure all forms and sizes, in one process of the box."""
    box.join()
    box.set_rate(box.parse_rate(arguments.rate))
    mesh = make_mesh(config.MeshConfig(expert=-1, data=1))
    background.connect(mesh)
    h = jax.device_put(jnp.zeros((mesh.size * _WIDTH, _WIDTH)), NamedSharding(mesh, BATCH_SPEC))
    ten = compiled(mesh, functools.partial(products, count=10), h)
    product_s = statistics.median(seconds(ten, h) for _ in range(5)) / 10
    results = {}
    for name, form in forms(mesh.size).items():
        for megabytes in arguments.megabytes:
            results[f"{name}, {megabytes} MB"] = found = probe(mesh, form, megabytes * MIB, product_s)
            if box.rank() == 0:
                numbers = "  ".join(f"{value:8.4f}" for value in found.values())
                print(f"{os.environ['PJRT_NPROC']} threads  {name:26} {megabytes:3} MB  {numbers}", flush=True)
    box.return_values(results)


def main() -> None:
    """Run the box with one and two threads, and write results/overlap_probe.json."""
    parser = CommandParser(prog="python profiling/overlap_probe.py", description=__doc__)
    parser.add_argument("--rate", default="400mbit", help="of every link (default 400mbit)")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16], help="size of a process's array")
    box.add_arguments(parser)
    arguments = parser.parse_args()
    if min(arguments.megabytes) < 1:
        raise ConfigError(f"--megabytes={min(arguments.megabytes)} must be at least 1")
    if box.rank() is not None:
        measure(arguments)
        return
    box.parse_rate(arguments.rate)
    results = {}
    print(f"{'':45}alone s  compute s   both s  in order   hidden    hidden")
    for threads in sorted({1, 2, arguments.threads}):
        arguments.threads = threads
        results[f"{threads} threads"] = box.run_in_box(box.box_from(arguments))
    write_result("overlap_probe", {"rate": arguments.rate, "processes": arguments.processes, **results})


if __name__ == "__main__":
    run_command(main)
