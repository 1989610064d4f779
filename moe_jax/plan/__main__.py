"""`python -m moe_jax.plan --model FILE --cluster h100x64`: how to train a model on a cluster, and how fast that is."""

import argparse
from pathlib import Path

from moe_jax.config_files import load_draft, to_yaml
from moe_jax.draft import open_draft
from moe_jax.errors import ConfigError, run_command
from moe_jax.measure.provenance import origin
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.plan_text import plan_text
from moe_jax.plan.planner import Plans, plan
from moe_jax.report.planned import compile_plans
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
        "--compile",
        action="store_true",
        help="compile the best plan for that hardware, which need not be there, and correct the estimates by it",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the best plan as a config; beside it what was printed, and a timeline",
    )
    arguments = parser.parse_intermixed_args()
    if arguments.out and arguments.out.suffix != ".yaml":
        raise ConfigError(f"--out {arguments.out} is to be a config: name a .yaml file")
    cluster = find_cluster(arguments.cluster)
    given = load_draft(arguments.model, arguments.overrides)
    draft = given if given.open else open_draft(given, but={each.partition("=")[0] for each in arguments.overrides})
    said: list[str] = []

    def tell(text: str) -> None:
        print("\n" * bool(said) + text, flush=True)
        said.append(text)

    if arguments.compile:
        plans = compile_plans(draft, cluster, tell).plans
    else:
        plans = plan(draft, cluster)
        tell(plan_text(plans))
    if arguments.out:
        _write(plans, "\n\n".join(said), arguments.out)


def _write(plans: Plans, text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(plans.config), encoding="utf-8")
    told = path.with_suffix(".txt")
    told.write_text("\n".join([text, "", *(f"{name}: {value}" for name, value in origin().items()), ""]), "utf-8")
    written = [path, told]
    try:
        bars = {"predicted": predicted_bars(plans.best.estimate.timeline)}
        blocks = plans.best.estimate.timeline.schedule.shape.kinds
        picture = path.with_suffix(".png")
        what = "one part of the batch on a stage" if plans.config.is_pipelined else "a step"
        draw(bars, picture, f"{len(blocks)} blocks of {what} on {plans.cluster.name}, {plans.best.mesh}")
        written.append(picture)
    except PlotError as error:
        print(f"no {picture}: {error}")
    print(f"wrote {', '.join(map(str, written))}")


if __name__ == "__main__":
    run_command(main)
