"""Which share of a compiled step is the optimizer's? python profiling/optimizer_hlo.py TARGET [section.key=value ...]

Compiles the step of `configs/bench/fine_grained.yaml` ahead of time and without the hardware, with AdamW and with Muon,
ZeRO 1 and all experts' ranks on one node, and sums the least times of its kernels (`roofline.py`): of the update,
and of all. Muon's products orthogonalize matrices. The result also has the plan's estimate of both.

Writes results/optimizer_hlo_TARGET.json. Takes some minutes for each optimizer.
"""

from typing import Any

from gpu_hlo import compiled
from real_compiler import read_command
from results_file import rounded, write_result
from roofline import OPTIMIZER, kernel_seconds

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.targets import Target
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import step_memory

CONFIG = "configs/bench/fine_grained.yaml"
SETTINGS = ("optimizer.zero=1",)


def _account(name: str, target: Target, overrides: list[str]) -> dict[str, Any]:
    """Compile the step with an optimizer; return the milliseconds of its update, and of its kernels together."""
    config = load_config(CONFIG, [*SETTINGS, f"optimizer.name={name}", *overrides])
    program, allocated = compiled(config, target)
    seconds = kernel_seconds(program, target)
    planned = estimate(config, find_cluster(f"{target.kind}x{config.mesh.sizes['expert']}"))
    return {
        "update_ms": rounded(1e3 * seconds[OPTIMIZER]),
        "kernels_ms": rounded(1e3 * sum(seconds.values())),
        "share": rounded(seconds[OPTIMIZER] / sum(seconds.values())),
        "planned_update_ms": rounded(1e3 * planned.busy.update),
        "planned_step_ms": rounded(1e3 * planned.step_s),
        "allocated_bytes": allocated,
        "planned_bytes": step_memory(config, target.platform).total,
    }


def main() -> None:
    """Compile with both optimizers and write results/optimizer_hlo_TARGET.json."""
    parser = CommandParser(prog="python profiling/optimizer_hlo.py", description=__doc__)
    arguments, target = read_command(parser, (), settings=True)
    if target.platform != "gpu":
        raise ConfigError(f"{target.name} is no GPU, whose kernels this reads: use h100:1x1x8")
    values = {name: _account(name, target, arguments.overrides) for name in ("adamw", "muon")}
    write_result(f"optimizer_hlo_{target.name.replace(':', '_')}", values)


if __name__ == "__main__":
    run_command(main)
