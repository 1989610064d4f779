"""How long is a step with each optimizer? python profiling/optimizer_times.py [STEPS]

Trains `configs/shakespeare_cpu.yaml` over four simulated expert ranks with sharded moments (ZeRO 1), with each
optimizer in turn, in several rounds, and takes the median step of each run and its ratio to AdamW's of the same round.
Simulated devices share cores, so these are times of the work of all devices. Writes results/optimizer_times.json.
Takes five minutes.
"""

import statistics

from count_argument import count_argument
from results_file import quartiles, write_result
from training_run import records_of

from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.distributed.processes import Processes, initialize
from moe_jax.errors import run_command

_DEVICES = 4
SETTINGS = [
    f"mesh.cpu_devices={_DEVICES}",
    "mesh.data=1",
    f"mesh.expert={_DEVICES}",
    "optimizer.zero=1",
    "log.every=1",
    "train.eval_every=0",
]
ROUNDS = 3


def main() -> None:
    """Train in rounds and write the result."""
    steps = count_argument("STEPS", 16, __doc__)
    initialize(Processes(mode="off"), _DEVICES)
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZER_FACTS}
    for _ in range(ROUNDS):
        for name, found in seconds.items():
            records = records_of([*SETTINGS, f"optimizer.name={name}"], steps)
            found.append(statistics.median(each["step_s"] for each in records if "step_s" in each))
    ratios = {
        name: quartiles([own / base for own, base in zip(found, seconds["adamw"], strict=True)])
        for name, found in seconds.items()
    }
    step_s = {name: quartiles(found) for name, found in seconds.items()}
    write_result("optimizer_times", {"steps": steps, "settings": SETTINGS, "step_s": step_s, "over_adamw": ratios})


if __name__ == "__main__":
    run_command(main)
