"""Start-up and speed of a training step: python profiling/bench_step.py [section.key=value …]

Trains `configs/shakespeare_cpu.yaml` on 8 simulated devices (expert=8) for a few steps in its own process. Then, in one
process, compares steps as the training loop runs them with bare ones, alternately. Takes about two minutes.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.peak import matrix_flops_per_s
from moe_jax.run.setup import compile_programs, open_run
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog, read_metrics

CONFIG = "configs/shakespeare_cpu.yaml"
STEPS = 40
_ROUND = 3  # steps of each kind in a round
SETTINGS = [
    "mesh.cpu_devices=8",
    "mesh.expert=8",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.eval_batches=1",
    "log.every=1",
    "log.sample_tokens=0",
]


def whole_command(overrides: list[str]) -> dict[str, float]:
    """Measure seconds from the command to the first loss on disk, the median step after it, and the peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moe_jax.train", "--config", CONFIG, *overrides, f"log.dir={folder}"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            metrics = Path(folder) / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
                time.sleep(0.01)
            first_loss_s = time.perf_counter() - start
        if process.returncode:
            sys.exit(process.returncode)
        steps = [
            record["step_s"]
            for record in read_metrics(Path(folder))
            if record["step"] > STEPS // 4 and "step_s" in record
        ]
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "command_to_first_loss_s": first_loss_s,
        "step_s": statistics.median(steps),
        "step_s_min": min(steps),
        "step_s_max": max(steps),
        "peak_memory_mib": peak_kib / 1024,
    }


def inside_one_process(config: Config) -> dict[str, float]:
    """Measure seconds to trace and compile, and rounds that alternate steps of the training loop with bare ones.

    The batch of a bare step is already on the devices, and a bare step logs nothing.
    """
    run = open_run(config)
    peak = matrix_flops_per_s(config.train.compute_dtype)
    start = time.perf_counter()
    programs = compile_programs(run)
    init, step_program, _ = (each.result() for each in (programs.init, programs.step, programs.evaluate))
    compile_s = time.perf_counter() - start
    state, batch = init(), run.on_mesh(next(run.batches))
    loop_s, bare_s = [], []
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), 0, _ROUND * STEPS, 1, False, quiet=False) as log:
        meter = Meter(config, log, peak)
        for step in range(STEPS):
            start = time.perf_counter()
            for index in range(_ROUND):
                state, metrics = step_program(state, run.on_mesh(next(run.batches)))
                meter.add(_ROUND * step + index + 1, metrics)
            meter.finish()
            between = time.perf_counter()
            for _ in range(_ROUND):
                state, metrics = step_program(state, batch)
            jax.block_until_ready(metrics)
            loop_s.append(between - start)
            bare_s.append(time.perf_counter() - between)
    ratios = [loop / bare for loop, bare in zip(loop_s, bare_s, strict=True)]
    return {"compile_s": compile_s, "bare_step_s": statistics.median(bare_s) / _ROUND} | {
        f"loop_over_bare_{name}": value for name, value in quartiles(ratios).items()
    }


def main() -> None:
    """Run both measurements and write results/bench_step.json."""
    parser = CommandParser(prog="python profiling/bench_step.py", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    overrides = [*SETTINGS, *parser.parse_args().overrides]
    with tempfile.TemporaryDirectory() as empty:
        config = load_config(CONFIG, [*overrides, f"log.dir={empty}"])
        initialize(Processes(mode="off"), config.mesh.cpu_devices)
        values = whole_command(overrides) | inside_one_process(config)
    values["steps_per_s"] = 1 / values["step_s"]
    values["tokens_per_s"] = config.train.batch_size * config.data.seq_len / values["step_s"]
    write_result("bench_step", {name: rounded(value) for name, value in values.items()})


if __name__ == "__main__":
    run_command(main)
