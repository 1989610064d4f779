"""Predictions for published training runs: python profiling/published_runs.py [--best]

Each run of published_runs.yaml is predicted on its own mesh; with --best, the best plan for the model, batch and
cluster of some of them is searched, too, which takes tens of minutes. Writes results/published_runs.json, and prints
the table of docs/published.md.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import yaml
from planned_model import draft_of
from results_file import rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.candidates import mesh_text
from moe_jax.plan.clusters import Cluster, LinkCurve, find_cluster
from moe_jax.plan.clusters.hardware import RateShares
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.measured import MeasuredTimes
from moe_jax.plan.pipelined import PipelinedStep
from moe_jax.plan.planner import plan

RUNS = Path(__file__).parent / "published_runs.yaml"
_BALANCED = "exchange.rank_capacity_factor=1.0"  # benchmarks balance the router, or drop what is beyond a capacity
# DeepEP's exchanges between nodes reach 43 to 58 of 50 GB/s, counted as bytes to and inside nodes (its README)
_DEEPEP = LinkCurve(30e-6, 0.9, 3e-6)
_FREE = ("mesh", "schedule", "exchange", "optimizer", "train.grad_accumulation")


def settings_of(run: dict[str, Any]) -> list[str]:
    """Return the settings of a run."""
    return [*run["mesh"].split(), *run["settings"].split(), _BALANCED]


def config_of(run: dict[str, Any]) -> Config:
    """Return the config of a run."""
    return load_config(f"configs/models/{run['model']}.yaml", [*settings_of(run), "optimizer.zero=1"])


def cluster_of(run: dict[str, Any], config: Config) -> Cluster:
    """Return the cluster of a run, changed by the features of its system (`has`) that this project lacks."""
    cluster, has = find_cluster(run["cluster"]), run.get("has", ())
    device, (inside, *between) = cluster.device, cluster.levels
    if "flash" in has:
        device = dataclasses.replace(device, platform="gpu")  # attention is timed as cuDNN's
    if "fp8" in has:
        # products at twice the rate, but not those of attention and the router
        device = dataclasses.replace(
            device,
            matrix_flops_per_s=2 * device.matrix_flops_per_s,
            attention_efficiency=device.attention_efficiency / 2,
            rate_shares=RateShares(device.rate_shares.float32 / 2, device.rate_shares.exact / 2),
        )
    if "deepep" in has:
        # links are as much faster as there are fewer rows on them
        ranks, moe = config.mesh.expert_ranks(config.mesh.sizes), config.model.moe
        nodes = ranks / CollectiveCosts(cluster).ranks_per_node(DeviceGroup(ranks, config.mesh.tensor))
        inside = inside.slower(1 / rows_per_place(moe.top_k, ranks))
        rows = moe.top_k / moe.topk_group if 1 < moe.n_group <= nodes else rows_per_place(moe.top_k, nodes)
        between = [dataclasses.replace(level.slower(1 / rows), all_to_all=_DEEPEP) for level in between]
    return dataclasses.replace(cluster, device=device, levels=(inside, *between))


def step_seconds(found: Estimate) -> float:
    """Return the predicted step of a run's own mesh. Other systems' stages do not wait for each other after every tick.

    They are idle while the pipeline fills and drains, for (stages - 1) / (chunks × parts) of the busiest stage's time
    (Narayanan et al. 2021, section 2.2). Pairs of passes are timed as here.
    """
    config = found.config
    if not config.step_facts.has_ticks:
        return found.step_s
    step = PipelinedStep(config, found.cluster, MeasuredTimes({}))
    if step.outline.has_pairs:
        return found.step_s
    filling = (config.mesh.pipeline - 1) / (config.schedule.virtual_stages * config.train.grad_accumulation)
    return max(step.stage_seconds) * (1 + filling) + found.busy.sums + found.busy.update


def rows_per_place(top_k: int, places: float) -> float:
    """Return how many rows of a token go to a rank or node that gets any, on average, if all are equally likely."""
    return top_k / (places * (1 - (1 - 1 / places) ** top_k))


def planned(run: dict[str, Any]) -> Estimate:
    """Return the estimate of the best plan, with the mesh, schedule and memory savings chosen freely."""
    fixed = [each for each in settings_of(run) if each == _BALANCED or not each.startswith(_FREE)]
    return plan(draft_of(run["model"], fixed), find_cluster(run["cluster"])).best.estimate


def described(found: Estimate, step_s: float) -> dict[str, Any]:
    """Return the figures of an estimate whose step takes `step_s`."""
    return {
        "tokens_per_s": rounded(found.tokens / step_s / found.cluster.devices),
        "mfu": rounded(found.mfu * found.step_s / step_s),
        "mesh": {axis: size for axis, size in found.config.mesh.sizes.items() if size > 1},
        "exposed": rounded(found.busy.exposed / step_s),
    }


def predicted(run: dict[str, Any], best: bool) -> dict[str, Any]:
    """Return the prediction of a run, and of its best plan if `best`."""
    config = config_of(run)
    found = estimate(config, cluster_of(run, config))
    own = described(found, step_seconds(found))
    free = planned(run) if best else None
    return {
        **{name: run[name] for name in ("name", "source", "cluster", "tokens_per_s")},
        "has": run.get("has", []),
        "predicted": own,
        "ratio": rounded(own["tokens_per_s"] / run["tokens_per_s"]),
        "best": free and described(free, free.step_s),
    }


def summary(ratios: list[float]) -> dict[str, float]:
    """Return the errors of predictions, by their ratios to what was published."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return {
        "runs": len(ratios),
        "median_ratio": rounded(statistics.median(ratios)),
        "median_error": rounded(statistics.median(errors)),
        "worst_error": rounded(max(errors)),
    }


def table(result: dict[str, Any]) -> str:
    """Return the runs as a Markdown table."""
    lines = [
        "| run | source | mesh | has | published | predicted | ratio | best plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        own, best = run["predicted"], run["best"]
        free = f"{best['tokens_per_s']:,.0f}: {mesh_text(best['mesh'])}" if best else ""
        lines.append(
            f"| {run['name']} | {run['source']} | {mesh_text(own['mesh'])} | {', '.join(run['has'])} | "
            f"{run['tokens_per_s']:,.0f} | {own['tokens_per_s']:,.0f} | {run['ratio']:.2f} | {free} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict all runs and write the results."""
    parser = CommandParser(prog="python profiling/published_runs.py", description=__doc__)
    parser.add_argument("--best", action="store_true", help="search the best plans of some runs, too")
    best = parser.parse_args().best
    given = yaml.safe_load(RUNS.read_text())
    found = [predicted(run, best and run.get("search", False)) for run in given["runs"]]
    ratios = [run["ratio"] for run in found]
    halves = {"even_rows": ratios[::2], "odd_rows": ratios[1::2], "all_rows": ratios}
    result = {"sources": given["sources"], "runs": found, **{name: summary(each) for name, each in halves.items()}}
    write_result("published_runs", result)
    print(table(result))


if __name__ == "__main__":
    run_command(main)
