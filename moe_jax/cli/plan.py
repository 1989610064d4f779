"""The command that plans the training of a model on a cluster and predicts its speed.

python -m moe_jax.plan --model FILE --cluster h100x64
"""

import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_jax.config import DataConfig, ModelConfig
from moe_jax.config.draft import open_draft
from moe_jax.config.ranges import Range, check_number
from moe_jax.config.validate.ranges import RANGES
from moe_jax.config.yaml_io import load_draft, to_yaml
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.files.atomic import check_writable, reason, write_together
from moe_jax.files.local_copy import upload
from moe_jax.files.places import output_file, parse_place, place
from moe_jax.measure.provenance import origin
from moe_jax.paths import shown
from moe_jax.plan.batch_size import batch_size_of
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.plan_text import plan_text
from moe_jax.plan.planner import Plans, plan
from moe_jax.plan.rank_capacity import with_load
from moe_jax.plan.units import seconds
from moe_jax.report.planned import compile_plans
from moe_jax.report.plots import PlotError
from moe_jax.report.timeline import draw, predicted_bars
from moe_jax.telemetry.run_log import MetricsError, read_metrics

_PRICES = Range(0, 1e6)  # dollars


def main() -> None:
    """Parse the command line, plan, print the plan, and write it if `--out` is set."""
    parser = CommandParser(
        prog="python -m moe_jax.plan",
        description="Find the mesh, the schedule and the exchange that train a model fastest on a cluster that need "
        "not be there, by simulated steps; print the best plans and why the others lost.",
        epilog="example: --model configs/models/mixtral_8x7b.yaml --cluster h100x64 train.batch_size=256 "
        "--out plans/mixtral.yaml",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings")
    parser.add_argument("--model", metavar="FILE", required=True, help="a config; its mesh and schedule are replaced")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        required=True,
        help=f"{', '.join(PRESETS)} with a number of devices, as in h100x64, v5p-512, 4xv5e-256, cpux4; "
        "the JSON file of a measured profile, or a YAML file that describes a cluster (docs/plan.md)",
    )
    parser.add_argument(
        "--load-factor",
        metavar="LOAD",
        help="rows of the busiest expert rank over the mean of all ranks: a number, or the folder of a run that "
        "recorded it; without it the router is balanced, and buffers have exchange.rank_capacity_factor",
    )
    parser.add_argument(
        "--dollars-per-hour",
        metavar="PRICE",
        type=float,
        help="the price of a device, for the cost of a billion tokens (default: a round number, see docs/plan.md)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the best plan for that hardware, which need not be there, and correct the estimates by it",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=place,
        help="write the best plan as a config; next to it the printed text and a timeline",
    )
    arguments = parser.parse_intermixed_args()
    if not arguments.model:
        raise ConfigError("--model '' names no config: name a YAML file, e.g. configs/models/mixtral_8x7b.yaml")
    cluster = find_cluster(arguments.cluster)
    if arguments.dollars_per_hour is not None:
        check_number("--dollars-per-hour", arguments.dollars_per_hour, _PRICES)
        device = dataclasses.replace(cluster.device, dollars_per_hour=arguments.dollars_per_hour)
        cluster = dataclasses.replace(cluster, device=device)
    loaded = load_draft(arguments.model, arguments.overrides)
    if not any(name.startswith("model.") for name in loaded.given):
        raise ConfigError(
            f"--model {arguments.model} sets nothing of the model: name a config with a model section, e.g. "
            "configs/models/mixtral_8x7b.yaml"
        )
    if arguments.load_factor is not None:
        loaded = with_load(loaded, _load(arguments.load_factor))
    if loaded.plan.cluster not in (None, arguments.cluster):
        raise ConfigError(
            f"plan.cluster={loaded.plan.cluster} contradicts --cluster {arguments.cluster}: use plan.cluster=null"
        )
    if arguments.out:
        arguments.out = output_file(arguments.out)
        _check(arguments.out, arguments.model)
    overridden = {each.partition("=")[0] for each in arguments.overrides}
    draft = loaded if loaded.open else open_draft(loaded, fixed=overridden)
    printed: list[str] = []

    def report(text: str) -> None:
        print("\n" * bool(printed) + text, flush=True)
        printed.append(text)

    if not loaded.open and "train.batch_size" not in overridden:
        batch = batch_size_of(draft, cluster, arguments.model)
        draft = dataclasses.replace(draft, train=dataclasses.replace(draft.train, batch_size=batch.sequences))
        report(batch.text)
    if arguments.compile:
        plans = compile_plans(draft, cluster, report).plans
    else:
        plans = plan(draft, cluster)
        report(plan_text(plans))
    if arguments.out:
        _write(plans, "\n\n".join(printed), arguments.out)


def _load(text: str) -> float:
    """The load factor that `--load-factor` gives: a number, or that of the last record of a run's folder.

    A run records single experts, of its worst block, so its load is an upper bound for ranks with several experts.
    """
    try:
        load = float(text)
    except ValueError:
        load = _recorded_load(text)
    check_number("--load-factor", load, RANGES["plan.load_factor"])
    return load


def _recorded_load(folder: str) -> float:
    try:
        records = read_metrics(parse_place("--load-factor", folder))
    except (MetricsError, OSError) as error:
        raise ConfigError(
            f"--load-factor {folder} is no number and no folder of a run: use e.g. 1.5 ({error})"
        ) from None
    for record in reversed(records):
        if (load := record.get("load_max_over_mean")) is not None:
            return float(load)
    raise ConfigError(f"--load-factor {folder}: its records have no load_max_over_mean: name a run with experts")


def _check(out: Path, model: str) -> None:
    """Raise ConfigError, before planning starts, if one of the three files cannot be written, or has been by others."""
    if out.suffix != ".yaml":
        raise ConfigError(f"--out {out} is to be a config: name a .yaml file")
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise ConfigError(f"--out {out} would replace --model {model}: name another file")
    for path in (out.with_suffix(suffix) for suffix in (".txt", ".png")):
        if path.is_file() and not out.exists():
            raise ConfigError(f"--out {out} would replace {path}, which no plan has written: name another file")
    with _os_errors_as_config_errors(out):
        check_writable(out, *(out.with_suffix(suffix) for suffix in (".txt", ".png")))


@contextmanager
def _os_errors_as_config_errors(out: Path) -> Iterator[None]:
    """Context that turns an OSError into a ConfigError about --out."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({reason(error)}): name another file") from None


def _write(plans: Plans, text: str, out: Path) -> None:
    facts = [f"{name}: {value}" for name, value in origin().items()]
    files = {
        out: (_head(plans) + to_yaml(plans.config)).encode(),
        out.with_suffix(".txt"): "\n".join([text, "", *facts, ""]).encode(),
    }
    picture = io.BytesIO()
    try:
        draw({"predicted": predicted_bars(plans.best.estimate.timeline)}, picture, _title(plans))
        files[out.with_suffix(".png")] = picture.getvalue()
    except PlotError as error:
        print(shown(f"no {out.with_suffix('.png')}: {error}"))
    with _os_errors_as_config_errors(out):
        write_together(files)
    upload(out.parent)
    print(shown(f"wrote {', '.join(map(str, files))}"))


def _head(plans: Plans) -> str:
    """Return the comment at the top of the planned config."""
    config = plans.config
    head = f"# Planned for {plans.cluster.name}: {seconds(plans.best.estimate.step_s)} a step, as predicted.\n"
    if config.data == DataConfig(seq_len=config.data.seq_len) and config.model.vocab_size != ModelConfig().vocab_size:
        head += (
            f"# Set data.path before training: the default is a text of bytes, and this model knows "
            f"{config.model.vocab_size:,} tokens.\n# scripts/prepare_text.py makes a folder of tokens from text.\n"
        )
    return head


def _title(plans: Plans) -> str:
    """Return the title of the timeline, which shows only some blocks, and one part of an accumulated batch."""
    found, config = plans.best.estimate, plans.config
    parts = config.train.grad_accumulation
    shown = [f"{len(found.timeline.schedule.shape.kinds)} of {config.model.num_blocks} blocks"]
    if config.step_facts.has_ticks:
        where = ", on one pipeline stage" if config.mesh.pipeline > 1 else ""
        shown.append(f"one of {parts} parts of the batch{where}")
    elif parts > 1:
        shown.append(f"the last of {parts} parts of the batch")
    return f"{', '.join(shown)}: from a step of {seconds(found.step_s)} on {plans.cluster.name}, {plans.best.mesh}"


if __name__ == "__main__":
    run_command(main)
