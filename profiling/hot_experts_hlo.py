"""Are copies of hot experts hidden? python profiling/hot_experts_hlo.py TARGET [section.key=value …]

Compiles a `unified` step of six of OLMoE's blocks (configs/models/olmoe.yaml) in bfloat16, without a capacity, in which
four experts of each block are copied, ahead of time and without the hardware. Expert ranks are all devices, with four
sequences of 4,096 tokens each. Reads off the scheduled program how long the choices of experts, the copies and the sums
of their gradients take, how much of that is exposed, and how many of these collectives are asynchronous. Targets:
h100:1x1x8, v5p:2x2x2, … Takes a few minutes. Writes results/hot_experts_hlo_TARGET.json.
"""

import math
from collections.abc import Sequence
from typing import Any

from real_compiler import read_command
from results_file import rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import Collective, replay
from moe_jax.report.compiled import Job, compile_job

_CONFIG = "configs/models/olmoe.yaml"
_SETTINGS = [
    *("model.num_layers=6", "model.moe.capacity_factor=null", "exchange.rank_capacity_factor=2", "mesh.data=1"),
    *("exchange.hot_experts=4", "train.compute_dtype=bfloat16", "schedule.policy=unified", "schedule.microbatches=2"),
    *("schedule.weight_grad=greedy", "schedule.grad_reduce=bucketed", "schedule.remat=dots"),
]
_SEQUENCES = 4  # of a device
_SCOPES = {"choices": "choose_hot_experts", "copies": "copy_hot_experts", "sums": "sum_hot_experts"}


def row(collectives: Sequence[Collective]) -> dict[str, Any]:
    """Summarise some collectives."""
    return {
        "collectives": len(collectives),
        "synchronous": sum(not each.is_async for each in collectives),
        "ms": rounded(1e3 * sum(each.seconds for each in collectives)),
        "exposed_ms": rounded(1e3 * sum(each.exposed_s for each in collectives)),
    }


def main() -> None:
    """Compile, and write results/hot_experts_hlo_TARGET.json."""
    parser = CommandParser(prog="python profiling/hot_experts_hlo.py", description=__doc__)
    arguments, target = read_command(parser, (), settings=True)
    ranks = math.prod(map(int, target.layout.split("x")))
    settings = [*_SETTINGS, f"mesh.expert={ranks}", f"train.batch_size={ranks * _SEQUENCES}", *arguments.overrides]
    text, outcome = compile_job(target, Job(target=target.name, config=_CONFIG, overrides=settings, options={}))
    result = replay(parse(text), target, outcome.num_devices, outcome.passes)
    found = {
        "settings": settings,
        "step_ms": rounded(1e3 * result.step_s),
        "all": row(result.collectives),
        **{
            name: row([each for each in result.collectives if scope in each.op_name]) for name, scope in _SCOPES.items()
        },
    }
    write_result(f"hot_experts_hlo_{target.name.replace(':', '_')}", found)


if __name__ == "__main__":
    run_command(main)
