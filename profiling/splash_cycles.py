"""How long does a layer's attention take on a TPU, by its compiler's account? python profiling/splash_cycles.py TARGET

Compiles attention, forward and backward, for one device, ahead of time and without the hardware: 4 sequences of 4,096
tokens, 16 heads with the widths of DeepSeek-V2-Lite's latent attention. XLA's operations have the cycles that the
compiler estimates. A Pallas kernel has no estimate, so that its instruction bundles are counted, one cycle each, in the
compiler's dump: all those of a grid step, but those of the main region only in steps whose block is not masked. Waiting
for memory is not counted. Targets: v5p:2x2x1. Takes a minute. Writes results/splash_cycles_TARGET.json.
"""

import itertools
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from real_compiler import read_command
from results_file import rounded, write_result

from moe_jax.config.attention_kernels import splash_block
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.measure.costs import compute_seconds
from moe_jax.measure.hlo import HloModule, parse
from moe_jax.measure.targets import Target, target_devices
from moe_jax.models.attention.kernels import KERNELS
from moe_jax.schedule.xla_flags import compiler_options

SEQUENCES, LENGTH, HEADS, QK_WIDTH, V_WIDTH = 4, 4096, 16, 192, 128
_BUNDLE = re.compile(r"^ *0x([0-9a-f]+)\s", re.M)
_BRANCH = re.compile(r"^ *0x([0-9a-f]+)\s.*\bsbr\.rel\b", re.M)
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder \S+, (\d+) /\* loop exit test \*/")
_PIPELINED = 2  # iterations of the grid's loop beyond its steps: loads begin earlier, and stores end later


class Kernel(NamedTuple):
    """The instructions of a Pallas kernel."""

    bundles: int  # of one step
    main_region: int  # of these, the bundles of its longest region, which masked blocks skip
    steps: int  # of the grid, on one core

    @classmethod
    def of(cls, text: str) -> "Kernel":
        """Read the dump of the final bundles."""
        branches = [int(found, 16) for found in _BRANCH.findall(text)]
        region = max(end - start for start, end in itertools.pairwise(branches))
        return cls(len(_BUNDLE.findall(text)), region, max(map(int, _EXIT.findall(text))) - _PIPELINED)

    def cycles(self, computed: float) -> float:
        """Return the cycles of a core, if this share of all blocks is computed."""
        return self.steps * (self.bundles - (1 - computed) * self.main_region)


def compiled(kernel: str, target: Target) -> HloModule:
    """Compile attention and the gradients of queries, keys and values."""
    device = target_devices(target)[0]
    sharding = SingleDeviceSharding(device)

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            out = KERNELS[kernel](query, key, value, None, QK_WIDTH**-0.5)
            return jnp.sum(out * cotangent, dtype=jnp.float32)

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    widths = (QK_WIDTH, QK_WIDTH, V_WIDTH, V_WIDTH)
    shapes = [
        jax.ShapeDtypeStruct((SEQUENCES, LENGTH, HEADS, each), jnp.bfloat16, sharding=sharding) for each in widths
    ]
    program = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=(target.platform,))
    options = compiler_options(target.platform, device.device_kind)
    return parse(program.compile(compiler_options=options).as_text() or "")


def operations_ms(program: HloModule, target: Target) -> float:
    """Return the estimated time of all operations but Pallas kernels."""
    lines = (line for line in program.computations[program.entry] if "tpu_custom_call" not in line.attributes)
    return 1e3 * sum(compute_seconds(line, program, target) for line in lines)


def main() -> None:
    """Compile both kernels, read the dump, write the result."""
    parser = CommandParser(prog="python profiling/splash_cycles.py", description=__doc__)
    _, target = read_command(parser, ())
    clock_hz = target.clock_hz
    if clock_hz is None:
        raise UserError(f"{target.name} is no TPU: use v5p:2x2x1")
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{before} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        splash = compiled("splash", target)
        dumps = {path.name: path.read_text() for path in Path(folder).glob("*splash*-final_bundles.txt")}
    kernels = {}
    for phase in ("fwd", "dq", "dkv"):
        (text,) = (text for name, text in dumps.items() if f"_{phase}_" in name and "analysis" not in name)
        kernels[phase] = Kernel.of(text)
    blocks = LENGTH // splash_block(LENGTH)
    computed = (blocks + 1) / (2 * blocks)
    kernels_ms = {phase: 1e3 * each.cycles(computed) / clock_hz for phase, each in kernels.items()}
    others_ms = operations_ms(splash, target)
    sizes = {"sequences": SEQUENCES, "length": LENGTH, "heads": HEADS, "qk_width": QK_WIDTH, "v_width": V_WIDTH}
    found = {
        "target": target.name,
        **sizes,
        "bundles": {phase: each._asdict() for phase, each in kernels.items()},
        "kernels_ms": {phase: rounded(each) for phase, each in kernels_ms.items()},
        "other_operations_ms": rounded(others_ms),
        "splash_ms": rounded(sum(kernels_ms.values()) + others_ms),
        "xla_ms": rounded(operations_ms(compiled("xla", target), target)),
    }
    write_result(f"splash_cycles_{target.name.replace(':', '_')}", found)


if __name__ == "__main__":
    run_command(main)
