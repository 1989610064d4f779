"""Is the program in the report the one that a run trains? python profiling/same_program.py TARGET [setting …]

Compiles the step of configs/bench/fine_grained.yaml, ahead of time and without the hardware, once as `report --compile`
does and once as a run does, and compares both scheduled programs. For GPUs it also compiles the step only once, without
estimated times of instructions. It also counts collectives with and without a start and a done, which is what the
compiler options are for. Targets: v5p:2x2x2, h200:1x1x8, … Takes a few minutes for each compilation. Writes
results/same_program_TARGET.json; exit code 1 if the two programs differ.
"""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

from real_compiler import program_hash, read_command, times_ms
from results_file import rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import Target, target_of
from moe_jax.parallel.mesh import make_mesh
from moe_jax.report.compile_step import devices_for
from moe_jax.report.compiled import Job, compile_job
from moe_jax.run.setup import Run, compile_programs
from moe_jax.run.tuning_space import config_of_first_step
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.trainer import Trainer, make_trainer

_CONFIG = "configs/bench/fine_grained.yaml"
_NAMES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}  # names of real ones in jax


def as_a_run_finds(target: Target) -> Target | None:
    """Return the target that a run derives from its devices: GPUs of a target are in nodes of one process each."""
    if target.platform != "gpu":
        return None
    slices, hosts, each = map(int, target.layout.split("x"))
    kind = _NAMES[target.kind]
    nodes = [node for node in range(slices * hosts) for _ in range(each)]
    found = target_of(
        [SimpleNamespace(device_kind=kind, slice_index=node, process_index=node) for node in nodes], range(len(nodes))
    )
    assert found is not None, "published"
    return found


def trained(config: Config, trainer: Trainer, target: Target | None) -> tuple[str, str]:
    """Return the fingerprint and the scheduled program of a run's step."""
    run: Any = SimpleNamespace(
        config=config,
        trainer=trainer,
        target=target,
        first_step=1,  # as in a resumed run: no parameters are drawn
        batch_shape=batch_shape(config, trainer.mesh),
    )
    typed: Run = run
    programs = compile_programs(typed)
    return programs.fingerprint, programs.step.result().as_text() or ""


def facts(text: str, target: Target, devices: int) -> dict[str, Any]:
    """Return the hash, the estimated milliseconds and the collectives of a scheduled program."""
    result = replay(parse(text), target, devices)
    kinds = Counter((each.kind, "async" if each.is_async else "sync") for each in result.collectives)
    return {
        "sha256": program_hash(text),
        **times_ms(result),
        "exposed_share": rounded(result.exposed_s / result.communication_s),
        "collectives": {f"{kind}, {how}": count for (kind, how), count in sorted(kinds.items())},
    }


def main() -> None:
    """Compile, and write results/same_program_TARGET.json."""
    parser = CommandParser(prog="python profiling/same_program.py", description=__doc__)
    arguments, target = read_command(parser, (), settings=True)
    config = load_config(_CONFIG, arguments.overrides)
    mesh = make_mesh(config.mesh, devices_for(config, target))
    config = config_of_first_step(config, mesh)
    trainer = make_trainer(config, mesh)
    job = Job(target=target.name, config=_CONFIG, overrides=arguments.overrides, options={})
    report, outcome = compile_job(target, job)
    fingerprint, run = trained(config, trainer, as_a_run_finds(target))
    values = {
        "report": {"fingerprint": outcome.fingerprint} | facts(report, target, mesh.size),
        "run": {"fingerprint": fingerprint} | facts(run, target, mesh.size),
    }
    same = values["report"] == values["run"]
    if target.platform == "gpu":
        once = step_program(trainer, batch_shape(config, mesh), None).compile().as_text() or ""
        values["compiled_once"] = facts(once, target, mesh.size)
    write_result(f"same_program_{target.name.replace(':', '_')}", {"same": same, **values})
    if not same:
        sys.exit("a run trains another program than the report shows")


if __name__ == "__main__":
    run_command(main)
