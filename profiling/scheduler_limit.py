"""What the memory limit of XLA:GPU's scheduler costs: python profiling/scheduler_limit.py h100:1x1x8

Compiles steps of OLMoE (configs/models/olmoe.yaml) that nearly fill an H100, ahead of time and without the hardware:
as runs do (`step/compile.py`), and with XLA's own limit, 95 % of the memory by its estimate. Takes a few minutes.
Writes results/scheduler_limit_TARGET.json.
"""

from typing import Any

from real_compiler import read_command, times_ms
from results_file import rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import Target
from moe_jax.report.compiled import Job, compile_job
from moe_jax.schedule.xla_flags import Value

_CONFIG = "configs/models/olmoe.yaml"
_MODEL = "mesh.data=2 mesh.expert=4 train.compute_dtype=bfloat16 model.moe.capacity_factor=1.25 optimizer.zero=3"
_STEPS = {
    "unified": "schedule.policy=unified schedule.microbatches=2 schedule.weight_grad=greedy schedule.remat=dots "
    "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=200 train.batch_size=64",
    "plain": "schedule.policy=vanilla schedule.microbatches=1 train.batch_size=16 data.seq_len=4736",
}
_LIMITS: dict[str, dict[str, Value]] = {"as runs do": {}, "with XLA's limit": {"xla_gpu_memory_limit_slop_factor": 95}}


def compiled(target: Target, settings: str, options: dict[str, Value]) -> dict[str, Any]:
    """Compile a step, and return its times and memory."""
    job = Job(target=target.name, config=_CONFIG, overrides=[*_MODEL.split(), *settings.split()], options=options)
    text, outcome = compile_job(target, job)
    allocated = outcome.argument_bytes + outcome.temporary_bytes + outcome.result_bytes
    return {**times_ms(replay(parse(text), target, outcome.num_devices)), "allocated_gb": rounded(allocated / 1e9)}


def main() -> None:
    """Compile, and write after each step."""
    parser = CommandParser(prog="python profiling/scheduler_limit.py", description=__doc__)
    _, target = read_command(parser, ())
    found: dict[str, dict[str, Any]] = {}
    for name, settings in _STEPS.items():
        found[name] = {limit: compiled(target, settings, options) for limit, options in _LIMITS.items()}
        print(name, found[name], flush=True)
        write_result(
            f"scheduler_limit_{target.name.replace(':', '_')}",
            {"settings": _MODEL, "steps": _STEPS, "memory_gb": (target.memory_bytes or 0) / 1e9, "found": found},
        )


if __name__ == "__main__":
    run_command(main)
