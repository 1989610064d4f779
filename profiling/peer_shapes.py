"""Steps of the sizes that peers publish, compiled for TPUs: python profiling/peer_shapes.py TARGET

Compiles training steps of four blocks with the widths of DeepSeek-V2-Lite (`fine`, the first block dense) and of
Mixtral 8x7B (`coarse`), 4 sequences of 4,096 tokens per chip, experts sharded over all chips, ahead of time and without
the hardware: plain (`vanilla`) and `unified` in 2 and 4 microbatches, with a capacity factor of 1.25 and without a
capacity. Reads off the scheduled programs the step, all communication, what of it is exposed, the kernels of attention,
temporary memory, and the CPU seconds of compilation. Target: v5p:2x2x2.

Writes results/peer_shapes_TARGET.json after each program, and keeps the results of others and of other settings on the
command line. Other load on the machine makes a compilation take more CPU seconds, so of a program that was compiled
before the fewest are kept. `--only NAMES` compiles these programs only, such as fine+unified2+capacity. Takes 7 minutes
of a core and 6 GB for each.
"""

import json
import math
import resource
import tempfile
from pathlib import Path
from typing import Any

from gpu_models import MODELS, config_of, with_capacity
from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import Replay, replay
from moe_jax.measure.targets import Target
from moe_jax.report.compiled import Job, compile_job

_BLOCKS, _SEQ_LEN, _SEQUENCES_PER_CHIP = 4, 4096, 4
_SCHEDULES = {
    "vanilla": (),
    "unified2": ("schedule.policy=unified", "schedule.microbatches=2"),
    "unified4": ("schedule.policy=unified", "schedule.microbatches=4"),
}
_ROOMS: dict[str, float | None] = {"capacity": 1.25, "dropless": None}
PROGRAMS = tuple(f"{model}+{schedule}+{room}" for model in MODELS for schedule in _SCHEDULES for room in _ROOMS)


def account(name: str, target: Target, overrides: list[str]) -> dict[str, Any]:
    """Compile one program in a process of its own, and return what it shows."""
    model, schedule, room = name.split("+")
    chips = math.prod(map(int, target.layout.split("x")))
    config = with_capacity(config_of(MODELS[model], _SEQUENCES_PER_CHIP * chips, _SEQ_LEN), _ROOMS[room])
    settings = [f"model.num_layers={_BLOCKS}", f"mesh.expert={chips}", *_SCHEDULES[schedule], *overrides]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        before = _seconds_of_children()
        text, outcome = compile_job(target, Job(target=target.name, config=str(path), overrides=settings, options={}))
    result = replay(parse(text), target, outcome.num_devices, outcome.passes)
    return {
        "settings": settings,
        "step_ms": rounded(1e3 * result.step_s),
        "communication_ms": rounded(1e3 * result.communication_s),
        "exposed_ms": rounded(1e3 * result.exposed_s),
        "exposed": _exposed(result),
        "attention_ms": rounded(1e3 * sum(each.seconds for each in result.compute if "splash" in each.op_name)),
        "temporary_gib": rounded(outcome.temporary_bytes / 2**30),
        "argument_gib": rounded(outcome.argument_bytes / 2**30),
        "compile_cpu_s": rounded(_seconds_of_children() - before),
        "fingerprint": outcome.fingerprint,
    }


def _exposed(result: Replay) -> dict[str, float]:
    """Return the exposed milliseconds of each kind of collective that has a tenth of one."""
    found: dict[str, float] = {}
    for each in result.collectives:
        name = f"{each.kind}, {'async' if each.is_async else 'sync'}"
        found[name] = found.get(name, 0.0) + 1e3 * each.exposed_s
    return {name: rounded(value) for name, value in sorted(found.items()) if value >= 0.1}


def with_fewest_seconds(found: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return what was found, with the CPU seconds of an earlier compilation of the same program if it took fewer."""
    if before is None or before["fingerprint"] != found["fingerprint"]:
        return found
    return found | {"compile_cpu_s": min(found["compile_cpu_s"], before["compile_cpu_s"])}


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Compile each program, and write results/peer_shapes_TARGET.json."""
    parser = CommandParser(prog="python profiling/peer_shapes.py", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAMES", help="programs to compile, such as fine+unified2+capacity,fine+unified4+capacity"
    )
    arguments, target = read_command(parser, (), settings=True)
    names = arguments.only.split(",") if arguments.only else PROGRAMS
    if unknown := set(names) - set(PROGRAMS):
        raise ConfigError(f"--only: {min(unknown)} is none of {', '.join(PROGRAMS)}")
    stem = f"peer_shapes_{target.name.replace(':', '_')}"
    path = RESULTS / f"{stem}.json"
    programs = json.loads(path.read_text())["programs"] if path.is_file() else {}
    for name in names:
        key = " ".join([name, *arguments.overrides])
        programs[key] = with_fewest_seconds(account(name, target, arguments.overrides), programs.get(key))
        write_result(stem, {"programs": programs})


if __name__ == "__main__":
    run_command(main)
