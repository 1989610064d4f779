"""What does XLA make of a training step for one GPU? python profiling/gpu_hlo.py TARGET [--layers N]

Compiles the two models of bench_gpu.py ahead of time and without the hardware: with a loop over as many blocks as fill
the device, with the same blocks unrolled, and the step that bench_gpu.py times (`filled`). It reads the scheduled
programs: which matrix products have float32 operands; whether attention is cuDNN's flash attention; and how much memory
the compiler allocates, compared with the prediction. The workspace of cuDNN is unknown without a GPU, and in neither
number. Targets: h100:1x1x1, h200:1x1x1. Takes a few minutes for each model.

Writes results/gpu_hlo_TARGET.json; exit code 1 if a product other than the router's has float32 operands, if attention
is not cuDNN's, or if the prediction is off by more than 5 %.
"""

import dataclasses
import re
import sys
from typing import Any

from gpu_models import MODELS, filling, unrolled
from real_compiler import read_command
from results_file import rounded, write_result
from roofline import kernel_seconds

from moe_jax.config import Config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.costs import is_attention, is_product
from moe_jax.measure.hlo import HloModule, Instruction, parse
from moe_jax.measure.targets import Target, target_devices
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.clusters import PRESETS
from moe_jax.plan.memory import step_memory
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.trainer import make_trainer

_ROUTER = re.compile(r"\broute\b")  # its scope; parameters and router stay float32
_MOST_ERROR = 0.05


def compiled(config: Config, target: Target) -> tuple[HloModule, int]:
    """Compile a step; return its scheduled program and the bytes that it allocates."""
    trainer = make_trainer(config, make_mesh(config.mesh, target_devices(target)))
    step = step_program(trainer, batch_shape(config, trainer.mesh), target).compile()
    memory = step.memory_analysis()
    assert memory is not None, "XLA:GPU reports its memory"
    result = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return parse(step.as_text() or ""), memory.argument_size_in_bytes + memory.temp_size_in_bytes + result


def read(program: HloModule) -> dict[str, Any]:
    """Count matrix products and attention calls, and list products outside the router with float32 operands."""
    products = [line for line in program.by_name.values() if is_product(line)]
    attention = [line for line in products if is_attention(line)]
    backward = sum("Backward" in line.attributes for line in attention)
    return {
        "products": len(products) - len(attention),
        "float32_products_of_router": sum(_is_float32(line, program) and _is_router(line) for line in products),
        "other_float32_products": [
            f"{line.shape} {line.op_name}" for line in products if _is_float32(line, program) and not _is_router(line)
        ],
        "flash_attention": {"forward": len(attention) - backward, "backward": backward},
    }


def kernels(program: HloModule, config: Config, target: Target) -> dict[str, Any]:
    """Return the least milliseconds of the kernels by kind, and the share that the model's operations alone take."""
    seconds = kernel_seconds(program, target)
    flops = config.train.batch_size * config.data.seq_len * train_flops_per_token(config.model, config.data.seq_len)
    return {
        "ms": {kind: rounded(1e3 * own_s) for kind, own_s in seconds.items()},
        "useful": rounded(flops / target.matrix_flops_per_s / sum(seconds.values())),
    }


def _account(config: Config, target: Target) -> dict[str, Any]:
    """Compile a step; return its products, memory and kernels."""
    program, allocated = compiled(config, target)
    predicted = step_memory(config, target.platform).total
    return {
        "blocks": config.model.num_layers,
        "sequences": config.train.batch_size,
        **read(program),
        "allocated_bytes": allocated,
        "predicted_bytes": int(predicted),
        "error": rounded(predicted / allocated - 1),
        "kernels": kernels(program, config, target),
    }


def _is_float32(line: Instruction, program: HloModule) -> bool:
    """Check the operands, not the result: sums of bfloat16 products are float32. Kernels also have integer operands."""
    shapes = [program.by_name[name].shape for name in line.operands]
    floats = [shape for shape in shapes if shape.startswith(("f32", "bf16"))]
    return not is_attention(line) and bool(floats) and all(shape.startswith("f32") for shape in floats[:2])


def _is_router(line: Instruction) -> bool:
    return bool(_ROUTER.search(line.op_name))


def main() -> None:
    """Compile both models and write results/gpu_hlo_TARGET.json."""
    parser = CommandParser(prog="python profiling/gpu_hlo.py", description=__doc__)
    parser.add_argument("--layers", type=int, metavar="N", help="blocks of each model (default: as many as fit)")
    arguments, target = read_command(parser, ("layers",))
    if target.platform != "gpu" or target.layout != "1x1x1":
        raise ConfigError(
            f"{target.name} is not one GPU: use {target.kind if target.platform == 'gpu' else 'h200'}:1x1x1"
        )
    memory_bytes = PRESETS[target.kind].device.memory_bytes
    assert memory_bytes is not None, "published"
    values: dict[str, Any] = {}
    for name, model in MODELS.items():
        config = filling(model, memory_bytes, looped=True)
        assert config is not None, "a block of each fits"
        if arguments.layers is not None:
            cut = dataclasses.replace(model, num_layers=arguments.layers)
            config = dataclasses.replace(config, model=cut)
        values[name] = _account(config, target) | {"unrolled": _account(unrolled(config), target)}
        if arguments.layers is None:
            filled = filling(model, memory_bytes)
            assert filled is not None, "a block of each fits"
            values[name]["filled"] = _account(filled, target)
    write_result(f"gpu_hlo_{target.name.replace(':', '_')}", values)
    if broken := [text for name, each in values.items() for text in _broken(name, each)]:
        sys.exit("; ".join(broken))


def _broken(name: str, found: dict[str, Any]) -> list[str]:
    claims = {
        f"float32 products: {found['other_float32_products']}": not found["other_float32_products"],
        "attention is not cuDNN's": all(found["flash_attention"].values()),
        **{f"memory is {error:+.1%} off": abs(error) <= _MOST_ERROR for error in _errors(found)},
    }
    return [f"{name}: {what}" for what, holds in claims.items() if not holds]


def _errors(found: dict[str, Any]) -> list[float]:
    return [found["error"], *(found[how]["error"] for how in ("unrolled", "filled") if how in found)]


if __name__ == "__main__":
    run_command(main)
