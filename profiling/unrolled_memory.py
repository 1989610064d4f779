"""What does XLA:GPU allocate for plain steps with all blocks unrolled? python profiling/unrolled_memory.py TARGET

Compiles such steps for one and eight GPUs of the target's kind (h100:1x1x8, h200:1x1x8), ahead of time and without the
hardware, and compares the bytes that the compiler allocates with `plan/memory.py`. About ten seconds for each of 14
steps. Writes results/unrolled_memory_KIND.json; exit code 1 if a prediction is off by more than 5 %.
"""

import statistics
import sys
from typing import Any

from memory_check import CONFIG, MODELS, PLAIN
from real_compiler import read_command
from results_file import rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.targets import find_target, target_devices
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.memory import step_memory
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.trainer import make_trainer

_MOST_ERROR = 0.05
_SEQUENCES, _SEQ_LEN = 4, 2048
CASES = [  # model, data × expert ranks, other settings
    *((name, 1, 1, "") for name in ("coarse", "wide", "dropless", "mixed", "dense", "gelu")),
    *((name, 1, 8, "") for name in ("coarse", "wide", "dropless")),
    *((name, 2, 4, "") for name in ("coarse", "wide")),
    ("coarse", 1, 1, "train.grad_accumulation=2"),
    ("coarse", 2, 4, "optimizer.zero=1"),
    ("coarse", 1, 1, "schedule.remat=full"),
]


def config_of(model: str, data: int, expert: int, settings: str) -> Config:
    """Return the config of a case."""
    overrides = [f"model.{each}" for each in MODELS[model].split()]
    overrides += [f"schedule.{each}" for each in PLAIN.split()]
    sizes = (
        f"train.batch_size={_SEQUENCES * data * expert} data.seq_len={_SEQ_LEN} mesh.data={data} mesh.expert={expert}"
    )
    return load_config(CONFIG, [*overrides, "schedule.unroll=64", *sizes.split(), *settings.split()])


def compare(config: Config, kind: str) -> dict[str, Any]:
    """Compile a step; return the bytes that were allocated and predicted."""
    target = find_target(f"{kind}:1x1x1" if config.mesh.expert == 1 else f"{kind}:1x1x8")
    trainer = make_trainer(config, make_mesh(config.mesh, target_devices(target)))
    memory = step_program(trainer, batch_shape(config, trainer.mesh), target).compile().memory_analysis()
    assert memory is not None, "XLA:GPU reports its memory"
    result = memory.output_size_in_bytes - memory.alias_size_in_bytes
    allocated = memory.argument_size_in_bytes + memory.temp_size_in_bytes + result
    predicted = int(step_memory(config, target.platform).total)
    return {
        "allocated_bytes": int(allocated),
        "predicted_bytes": predicted,
        "error": rounded(predicted / allocated - 1),
    }


def main() -> None:
    """Compile all cases and write results/unrolled_memory_KIND.json."""
    parser = CommandParser(prog="python profiling/unrolled_memory.py", description=__doc__)
    _, target = read_command(parser, ())
    if target.platform != "gpu":
        raise ConfigError(f"{target.name} is not of GPUs: use h100:1x1x8 or h200:1x1x8")
    found: dict[str, Any] = {}
    for model, data, expert, settings in CASES:
        name = " ".join(f"{model}, data {data}, expert {expert} {settings}".split())
        found[name] = compare(config_of(model, data, expert, settings), target.kind)
        print(f"{name}: {found[name]['error']:+.1%}", flush=True)
    errors = [each["error"] for each in found.values()]
    worst = max(errors, key=abs)
    write_result(
        f"unrolled_memory_{target.kind}",
        {"cases": found, "median_error": rounded(statistics.median(map(abs, errors))), "worst_error": worst},
    )
    if abs(worst) > _MOST_ERROR:
        sys.exit(f"a prediction is {worst:+.1%} off")


if __name__ == "__main__":
    run_command(main)
