"""Do the hops of ring attention overlap with its products on real compilers? python profiling/ring_attention.py TARGET

Compiles causal attention, forward and backward, of sequences that are sharded over all devices, ahead of time and
without the hardware: around a ring, and with all keys and values gathered first. Counts, in the scheduled programs, the
transfers that are asynchronous and those with a matrix product between start and done; an estimate by published rates
gives their hidden share. Targets as in docs/compiled.md: h100:1x1x8, v5p:2x2x2. Takes seconds to minutes for each
program. Writes results/ring_attention_TARGET.json; exit code 1 unless the ring hides more than the gathers.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from real_compiler import compile_on, read_command, row_dtype
from results_file import rounded, write_result

from moe_jax import config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import HloModule
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import Target, target_devices
from moe_jax.models.attention.over_context import FORMS
from moe_jax.parallel.mesh import Axis, make_mesh

_SIZES = ("length", "heads", "kv_heads", "head_dim")
_SPEC = PartitionSpec(None, Axis.CONTEXT)


def compile_form(form: str, mesh: jax.sharding.Mesh, platform: str, sizes: argparse.Namespace) -> HloModule:
    """Compile the attention output of one sequence's queries, and the gradients of queries, keys and values."""
    dtype, sharding = row_dtype(platform), NamedSharding(mesh, _SPEC)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    shapes = [jax.ShapeDtypeStruct((1, sizes.length, n, sizes.head_dim), dtype, sharding=sharding) for n in heads]

    def body(*projected: jax.Array) -> Any:
        def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            seen = FORMS[form](query, (key, value), (), None, None, None, None, sizes.head_dim**-0.5)
            return jnp.square(seen.astype(jnp.float32)).sum()

        return jax.grad(total, (0, 1, 2))(*projected)

    return compile_on(mesh, platform, body, _SPEC, *shapes)


def study(program: HloModule, target: Target, devices: int) -> dict[str, Any]:
    """Describe one form."""
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
    """Read the command line, compile and describe both forms, write the result."""
    parser = CommandParser(prog="python profiling/ring_attention.py", description=__doc__)
    parser.add_argument("--length", type=int, default=65536, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="of queries (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=4, help="of keys and values (default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="width of a head (default %(default)s)")
    arguments, target = read_command(parser, _SIZES)
    devices = target_devices(target)
    settings = config.Config(
        mesh=config.MeshConfig(data=1, context=len(devices)), data=config.DataConfig(seq_len=arguments.length)
    )  # checks that the sequence divides
    mesh = make_mesh(settings.mesh, devices)
    forms = {form: study(compile_form(form, mesh, target.platform, arguments), target, mesh.size) for form in FORMS}
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    write_result(f"ring_attention_{target.name.replace(':', '_')}", {"ranks": mesh.size, **sizes, "forms": forms})
    if forms["ring"]["hidden"] <= forms["all_gather"]["hidden"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
