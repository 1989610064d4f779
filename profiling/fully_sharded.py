"""Are gathers of sharded parameters hidden? python profiling/fully_sharded.py TARGET [section.key=value …]

Compiles the step of configs/bench/fine_grained.yaml with six blocks in a loop and two data ranks, ahead of time and
without the hardware, with sharded parameters (stage 3), with each block gathered right before it computes as well, with
whole parameters (0) and with sharded moments (1). Reads off the scheduled programs how much communication is exposed,
in all and of gathers of parameters; how many collectives have a start and a done; and the memory that the compiler
allocates. Targets: v5p:2x2x2, h100:1x1x8, h200:1x8x8, … Takes a few minutes for each stage. Writes
results/fully_sharded_TARGET.json.
"""

import math
from collections import Counter
from typing import Any

from real_compiler import read_command
from results_file import rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import Collective, replay
from moe_jax.measure.targets import Target
from moe_jax.measure.tasks import action_of
from moe_jax.report.compiled import Job, compile_job
from moe_jax.schedule.actions import is_param_gather

_CONFIG = "configs/bench/fine_grained.yaml"
_LOOP = ["model.num_layers=6", "schedule.unroll=1", "schedule.bucket_cap_mb=16"]
_STAGES = {
    "3": ["optimizer.zero=3"],
    "3, block": ["optimizer.zero=3", "schedule.param_gather=block"],
    "0": ["optimizer.zero=0"],
    "1": ["optimizer.zero=1"],
}


def is_gather_of_params(transfer: Collective) -> bool:
    """Whether a collective gathers parameters."""
    action = action_of(transfer.op_name)
    return action is not None and is_param_gather(action)


def row(target: Target, overrides: list[str]) -> dict[str, Any]:
    """Compile one stage, and return what its program shows."""
    text, outcome = compile_job(target, Job(target=target.name, config=_CONFIG, overrides=overrides, options={}))
    result = replay(parse(text), target, outcome.num_devices, outcome.passes)
    kinds = Counter((each.kind, "async" if each.is_async else "sync") for each in result.collectives)
    gathers = [each for each in result.collectives if is_gather_of_params(each)]
    allocated = outcome.argument_bytes + outcome.temporary_bytes + outcome.result_bytes
    return {
        "step_ms": rounded(1e3 * result.step_s),
        "communication_ms": rounded(1e3 * result.communication_s),
        "exposed_ms": rounded(1e3 * result.exposed_s),
        "exposed_share": rounded(result.exposed_s / result.communication_s),
        "gathers": len(gathers),
        "gathers_exposed_ms": rounded(1e3 * sum(each.exposed_s for each in gathers)),
        "gathers_ms": rounded(1e3 * sum(each.seconds for each in gathers)),
        "synchronous_gathers": sum(not each.is_async for each in gathers),
        "collectives": {f"{kind}, {how}": count for (kind, how), count in sorted(kinds.items())},
        "allocated_gb": rounded(allocated / 1e9),
        "state_gb": rounded(outcome.argument_bytes / 1e9),
        "compile_s": rounded(outcome.compile_s),
    }


def main() -> None:
    """Compile each stage, and write results/fully_sharded_TARGET.json."""
    parser = CommandParser(prog="python profiling/fully_sharded.py", description=__doc__)
    arguments, target = read_command(parser, (), settings=True)
    ranks = math.prod(map(int, target.layout.split("x"))) // 2
    common = ["mesh.data=2", f"mesh.expert={ranks}", f"train.batch_size={4 * ranks}", *_LOOP, *arguments.overrides]
    rows = {}
    for stage, own in _STAGES.items():
        rows[stage] = row(target, [*common, *own])
        write_result(f"fully_sharded_{target.name.replace(':', '_')}", {"settings": common, "stages": rows})


if __name__ == "__main__":
    run_command(main)
