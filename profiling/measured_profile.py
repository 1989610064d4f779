"""What does a measured profile change? python profiling/measured_profile.py TARGET [setting …]

Compiles the step of configs/bench/fine_grained.yaml ahead of time for GPUs that are not present, as a run with
`schedule.profile_steps` does: by estimated times, without CUDA graphs for a trace, and by a profile of such a trace. No
time is measured: the "trace" holds estimated times, once as published, and once with transfers that take twice as long,
as on links that are slower than published. Each program is then replayed with links of both rates. Targets:
h200:1x1x8, h100:1x1x8, … Takes a few minutes. Writes results/measured_profile_TARGET.json; exit code 1 if the
instructions of the traced program are not those that the scheduler asks for.
"""

import dataclasses
import re
import sys
from typing import Any

from real_compiler import program_hash, read_command, times_ms
from results_file import write_result

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.costs import collective_of, collective_seconds
from moe_jax.measure.hlo import HloModule, parse
from moe_jax.measure.overlap import replay
from moe_jax.measure.profile import estimated_profile, measured_profile
from moe_jax.measure.targets import Target
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.task_times import Linear
from moe_jax.report.compile_step import devices_for
from moe_jax.run.tuning_space import config_of_first_step
from moe_jax.step.compile import batch_shape, step_program
from moe_jax.step.trainer import make_trainer

_CONFIG = "configs/bench/fine_grained.yaml"
_SLOWER = 2.0
_NAME = re.compile(r'name: "([^"]*)"')


def transfers(program: HloModule, target: Target, num_devices: int) -> dict[str, float]:
    """Return the seconds of a program's collectives, by name."""
    lines = [line for line in program.by_name.values() if not line.is_control]
    found = {line.name: collective_of(line, program) for line in lines}
    return {
        name: collective_seconds(collective, program, target, num_devices)
        for name, collective in found.items()
        if collective is not None
    }


def slowed(target: Target) -> Target:
    """Return the target with links of a fraction of their rates."""

    def slower(link: Linear) -> Linear:
        return Linear(_SLOWER * link.alpha_s, _SLOWER * link.beta_s)

    return dataclasses.replace(target, link=slower(target.link), network=slower(target.network))


def facts(text: str, targets: dict[str, Target], num_devices: int) -> dict[str, Any]:
    """Return a program's hash, and its milliseconds on each target."""
    program = parse(text)
    times = {name: times_ms(replay(program, target, num_devices)) for name, target in targets.items()}
    return {"sha256": program_hash(text), **times}


def main() -> None:
    """Compile, and write results/measured_profile_TARGET.json."""
    parser = CommandParser(prog="python profiling/measured_profile.py", description=__doc__)
    arguments, target = read_command(parser, (), settings=True)
    config = load_config(_CONFIG, arguments.overrides)
    mesh = make_mesh(config.mesh, devices_for(config, target))
    config = config_of_first_step(config, mesh)
    trainer = make_trainer(config, mesh)
    program, size = step_program(trainer, batch_shape(config, mesh), target), mesh.size
    targets = {"links_as_published": target, "links_of_half_the_rate": slowed(target)}
    estimated = program.compile().as_text() or ""
    traced = parse(program.for_tracing.compile().as_text() or "")
    asked, known = (set(_NAME.findall(estimated_profile(each, target, size))) for each in (parse(estimated), traced))
    values: dict[str, Any] = {"by_estimated_times": facts(estimated, targets, size)}
    for name, rates in zip(("by_times_as_estimated", "by_slower_transfers"), targets.values(), strict=True):
        seconds = transfers(traced, rates, size)
        profile = measured_profile(traced, seconds, target, size, trainer.kind.facts.orders_tasks)
        by_profile = program.with_measured(profile).compile().as_text() or ""
        values[name] = facts(by_profile, targets, size)
    write_result(
        f"measured_profile_{target.name.replace(':', '_')}",
        {"instructions": len(asked), "unknown_instructions": len(asked - known), **values},
    )
    if asked - known:
        sys.exit(f"{len(asked - known)} instructions of the step are not in the program to trace")


if __name__ == "__main__":
    run_command(main)
