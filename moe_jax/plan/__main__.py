"""`python -m moe_jax.plan --model FILE --cluster h100x64`: how to train a model on a cluster, and how fast that is."""

import argparse
from pathlib import Path

from moe_jax.config import Config
from moe_jax.config_files import load_config, to_yaml
from moe_jax.errors import ConfigError, run_command
from moe_jax.plan.candidates import with_settings
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.plan_text import facts, refusals, table
from moe_jax.plan.planner import Plans, plan
from moe_jax.report.plots import PlotError
from moe_jax.report.timeline import draw, predicted_bars


def main() -> None:
    """Read the command line, plan, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_jax.plan",
        description="Find the mesh, the schedule and the exchange that train a model fastest on a cluster that need "
        "not be there, by simulated steps; print the best ways and why the others lost.",
        epilog="example: --model configs/models/mixtral_8x7b.yaml --cluster h100x64 train.batch_size=256 "
        "--out plans/mixtral.yaml",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    parser.add_argument("--model", metavar="FILE", required=True, help="a config; its mesh and schedule are replaced")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        required=True,
        help=f"{', '.join(PRESETS)} with a number of devices, as in h100x64, v5p-512, 4xv5e-256; "
        "or the JSON file of a measured profile",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the best plan as a config, a timeline beside it"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.out and arguments.out.suffix != ".yaml":
        raise ConfigError(f"--out {arguments.out} is to be a config: name a .yaml file")
    cluster = find_cluster(arguments.cluster)
    plans = plan(load_config(arguments.model, arguments.overrides), cluster)
    print(table(plans))
    if plans.refused:
        print(f"\n{refusals(plans)}")
    print(f"\n{facts(plans)}")
    if arguments.out:
        _write(plans, arguments.out)


def _write(plans: Plans, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(planned(plans)), encoding="utf-8")
    picture = path.with_suffix(".png")
    try:
        bars = {"predicted": predicted_bars(plans.best.estimate.timeline)}
        blocks = plans.best.estimate.timeline.schedule.shape.kinds
        draw(bars, picture, f"{len(blocks)} blocks of a step on {plans.cluster.name}, {plans.best.mesh}")
    except PlotError as error:
        print(f"no {picture}: {error}")
        picture = path
    print(f"wrote {path}" + (f" and {picture}" if picture != path else ""))


def planned(plans: Plans) -> Config:
    """The best plan as a config: an exchange by way of nodes is written down, others are left to the program."""
    best = plans.best
    if best.estimate.algorithm == "flat":
        return best.config
    return with_settings(best.config, exchange={"algorithm": best.estimate.algorithm})


if __name__ == "__main__":
    run_command(main)
