"""Are gathers of sharded parameters hidden? python profiling/fully_sharded.py TARGET [section.key=value …]

Compiles a step of OLMoE (configs/models/olmoe.yaml, 16 blocks in a loop) in bfloat16 with two data ranks, and as many
expert ranks as that leaves, ahead of time and without the hardware: with sharded parameters (stage 3), with each block
gathered right before it computes as well, with whole parameters (0) and with sharded moments (1). A device has four
sequences of 4,096 tokens, two in each microbatch. Reads off the scheduled programs how much communication is
exposed, in all and of gathers of parameters; how many collectives have a start and a done; and the memory that the
compiler allocates, beside the planned one. Targets: v5p:2x2x2, v5p:4x4x4, h100:1x8x8, … `--stages NAMES` compiles
these only, such as "3;0", and `--model six_blocks` six blocks of configs/bench/fine_grained.yaml, which have nearly no
vocabulary. Takes about ten minutes for each stage. Writes results/fully_sharded_olmoe_TARGET.json, or
fully_sharded_TARGET.json, after each, and keeps the others.
"""

import json
import math
from collections import Counter
from typing import Any, NamedTuple

from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import Collective, replay
from moe_jax.measure.targets import Target
from moe_jax.measure.tasks import action_of
from moe_jax.plan.memory import step_memory
from moe_jax.report.compiled import Job, compile_job
from moe_jax.schedule.actions import is_param_gather

_OLMOE = ["train.compute_dtype=bfloat16", "model.moe.capacity_factor=1.25"]
_OLMOE += ["schedule.policy=unified", "schedule.microbatches=2", "schedule.weight_grad=greedy"]
_OLMOE += ["schedule.grad_reduce=bucketed", "schedule.bucket_cap_mb=200"]


class _Model(NamedTuple):
    """A model, and the settings of its step."""

    config: str
    settings: list[str]
    sequences: int  # of a device


_MODELS = {
    "olmoe": _Model("configs/models/olmoe.yaml", _OLMOE, 4),
    "six_blocks": _Model(
        "configs/bench/fine_grained.yaml",
        ["model.num_layers=6", "schedule.unroll=1", "schedule.bucket_cap_mb=16"],
        2,
    ),
}
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


def row(target: Target, path: str, overrides: list[str]) -> dict[str, Any]:
    """Compile one stage, and return what its program shows."""
    text, outcome = compile_job(target, Job(target=target.name, config=path, overrides=overrides, options={}))
    result = replay(parse(text), target, outcome.num_devices, outcome.passes)
    kinds = Counter((each.kind, "async" if each.is_async else "sync") for each in result.collectives)
    gathers = [each for each in result.collectives if is_gather_of_params(each)]
    planned = step_memory(load_config(path, overrides), target.platform)
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
        "planned_gb": rounded(planned.total / 1e9),
        "state_gb": rounded(outcome.argument_bytes / 1e9),
        "compile_s": rounded(outcome.compile_s),
    }


def main() -> None:
    """Compile each stage, and write results/fully_sharded_TARGET.json."""
    parser = CommandParser(prog="python profiling/fully_sharded.py", description=__doc__)
    parser.add_argument("--model", choices=_MODELS, default="olmoe", help="default: %(default)s")
    parser.add_argument("--stages", default=";".join(_STAGES), metavar="NAMES", help="default: %(default)s")
    arguments, target = read_command(parser, (), settings=True)
    names = arguments.stages.split(";")
    if unknown := set(names) - _STAGES.keys():
        raise ConfigError(f"--stages={arguments.stages}: {min(unknown)!r} is none of {'; '.join(_STAGES)}")
    ranks = math.prod(map(int, target.layout.split("x"))) // 2
    model = _MODELS[arguments.model]
    settings = ["mesh.data=2", f"mesh.expert={ranks}", f"train.batch_size={2 * ranks * model.sequences}"]
    settings += [*model.settings, *arguments.overrides]
    stem = f"fully_sharded_{'olmoe_' if arguments.model == 'olmoe' else ''}{target.name.replace(':', '_')}"
    path = RESULTS / f"{stem}.json"
    last = json.loads(path.read_text()) if path.is_file() else {}
    rows = last["stages"] if last.get("settings") == settings else {}
    for name in names:
        rows[name] = row(target, model.config, [*settings, *_STAGES[name]])
        write_result(stem, {"settings": settings, "stages": rows})


if __name__ == "__main__":
    run_command(main)
