"""Do Lancet's ranges of the forward pass help the planner? python profiling/forward_ranges.py

Simulates models of three MoE layers on the 16 expert ranks of two nodes of H100, over a grid of sequences per device,
sequence length and expert width. Compares the simulated step of the policy and degree that the best ranges suggest with
the best of all schedules whose degrees are powers of two, and that schedule's forward pass with the one in ranges.
Takes about a minute. Writes results/forward_ranges.json.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from results_file import quartiles, rounded, write_result

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.draft import open_draft
from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.candidates import choices, scheduled, schedules
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.forward import best_ranges

CLUSTER = find_cluster("h100x16")
_FASTER = 1.01
GRID: Mapping[str, tuple[int, ...]] = {
    "sequences": (2, 3, 4, 6, 8, 12),
    "seq_len": (512, 2048),
    "expert_width": (512, 2048, 8192),
}


def config_of(sequences: int, seq_len: int, expert_width: int) -> Config:
    """Return the config of a model on a mesh of expert ranks."""
    ranks = CLUSTER.devices
    moe = MoEConfig(num_experts=ranks, top_k=2, intermediate_size=expert_width, num_shared_experts=1)
    return Config(
        model=ModelConfig(
            vocab_size=4096, hidden_size=1024, num_layers=3, num_attention_heads=8, intermediate_size=4096, moe=moe
        ),
        mesh=MeshConfig(data=1, expert=ranks),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(batch_size=ranks * sequences),
    )


def compared(config: Config) -> tuple[float, float]:
    """Return the ratios of the suggested step to the best one, and of the best one's forward pass to that in ranges."""
    draft = open_draft(config)
    candidates = choices(draft, config, ({"schedule": each} for each in schedules()))
    best = min((estimate(each, CLUSTER) for each in candidates), key=lambda found: found.step_s)
    ranges = best_ranges(best)
    suggested = ({"schedule": scheduled(found.policy, found.parts)} for found in ranges.cut)
    # without ranges, nothing else is suggested
    step_s = min((estimate(each, CLUSTER).step_s for each in choices(draft, config, suggested)), default=best.step_s)
    return step_s / best.step_s, ranges.scheduled_s / ranges.best.seconds


def main() -> None:
    """Simulate all cases and write the results."""
    CommandParser(prog="python profiling/forward_ranges.py", description=__doc__).parse_args()
    found = {values: compared(config_of(*values)) for values in itertools.product(*GRID.values())}
    by_three = [step for (sequences, *_), (step, _) in found.items() if sequences % 3 == 0]
    others = [step for (sequences, *_), (step, _) in found.items() if sequences % 3]
    forward = [each for _, each in found.values()]
    values: dict[str, Any] = {"grid": GRID, "cluster": CLUSTER.name}
    for name, ratios in (
        ("suggested_over_best_step_if_sequences_divide_by_3", by_three),
        ("suggested_over_best_step_otherwise", others),
        ("scheduled_over_ranges_forward", forward),
    ):
        values[name] = quartiles(ratios) | {"least": rounded(min(ratios)), "most": rounded(max(ratios))}
    values["ranges_more_than_1_percent_faster"] = f"{sum(ratio > _FASTER for ratio in forward)} of {len(forward)}"
    write_result("forward_ranges", values)


if __name__ == "__main__":
    run_command(main)
