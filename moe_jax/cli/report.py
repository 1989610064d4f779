"""The command that writes the report of a run, or describes a step compiled for a target.

python -m moe_jax.report RUN
python -m moe_jax.report --compile TARGET --config FILE
"""

import argparse
from pathlib import Path

from moe_jax.config.ranges import Range, check_number
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.files.atomic import check_writable
from moe_jax.files.local_copy import local_path, upload, url_of
from moe_jax.files.places import output_folder, parse_place, place
from moe_jax.measure.provenance import origin
from moe_jax.measure.targets import find_target
from moe_jax.paths import shown
from moe_jax.report import write_report
from moe_jax.report.alarms import alarm_text
from moe_jax.report.compiled import Compiled, compile_variants, variants_of
from moe_jax.report.compiled_text import assumptions, compare, describe
from moe_jax.report.measured import TracedStep, describe_measured, measure, read_traced, variant_of
from moe_jax.report.page import watch
from moe_jax.report.plots import PlotError
from moe_jax.report.timeline import compiled_bars, draw, measured_bars, predicted_bars, write_trace
from moe_jax.schedule.xla_flags import Value

_DAY_S = 86_400


class UsageError(UserError):
    """Command-line arguments that contradict each other."""


def main() -> None:
    """Parse the command line, and write the page of a run or print the description of a compiled step."""
    parser = CommandParser(
        prog="python -m moe_jax.report",
        description="Write RUN/report.html: key numbers, curves, expert load, a text sample and the config of a run, "
        "on one page that can be sent around by itself. Or compile a training step for hardware that need not be "
        "there, and report what the compiler made of its schedule.",
        epilog="examples: runs/default; --compile v5p:2x2x2 --config configs/bench/fine_grained.yaml "
        "schedule.microbatches=2 --policies vanilla,expert_pipeline,unified --out reports/v5p",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of a run (its log.dir); it may still be running")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="with --compile: settings"
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=int,
        help="write the page of a running run this often, until it ends or Ctrl-C; browsers follow",
    )
    compiled = parser.add_argument_group("a compiled step")
    compiled.add_argument(
        "--compile", metavar="TARGET", help="v5p:2x2x2, v6e:4x4, h100:1x8x8 (slices × hosts × GPUs), …"
    )
    compiled.add_argument("--config", metavar="FILE", help="YAML file, or the folder of a run")
    compiled.add_argument(
        "--policies", metavar="A,B", help="compare these; unified+exchange.algorithm=ring adds a setting"
    )
    compiled.add_argument("--save-hlo", metavar="DIR", type=place, help="keep each scheduled program as DIR/POLICY.hlo")
    compiled.add_argument("--out", metavar="DIR", type=place, help="write report.txt, timeline.png and trace.json here")
    compiled.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="one more compiler option"
    )
    compiled.add_argument(
        "--trace",
        metavar="DIR",
        type=place,
        help="what log.trace_step left of a run: measured lanes in the timeline",
    )
    arguments = parser.parse_intermixed_args()
    arguments.trace = arguments.trace and local_path(arguments.trace)
    arguments.out, arguments.save_hlo = (each and output_folder(each) for each in (arguments.out, arguments.save_hlo))
    if arguments.compile is None:
        _page(arguments)
    else:
        _compiled(arguments)


def _page(arguments: argparse.Namespace) -> None:
    for name in ("trace", "config", "policies", "save_hlo", "out", "option"):
        if value := getattr(arguments, name):
            text = f"--{name.replace('_', '-')} {value[0] if name == 'option' else value}"
            raise UsageError(f"{text} goes with --compile TARGET --config FILE: name both")
    if arguments.run is None:
        raise UsageError("nothing to report on: name the folder of a run, or --compile TARGET --config FILE")
    if arguments.overrides:
        raise UsageError(f"{arguments.overrides[0]!r} is a setting for --compile: name one folder only")
    run, every_s = parse_place("RUN", arguments.run), arguments.watch
    if every_s is None:
        print(f"wrote {shown(str(write_report(run)))}")
        upload(run)
        if text := alarm_text(run):
            print(text)
        return
    check_number("--watch", every_s, Range(1, _DAY_S))
    if url := url_of(run):
        raise UsageError(f"--watch={every_s} rewrites the page on this machine, and {url} is in a bucket: leave it out")
    watch(run, every_s)


def _compiled(arguments: argparse.Namespace) -> None:
    if arguments.watch is not None:
        raise UsageError(f"--watch={arguments.watch} is for the page of a run, and --compile writes none: drop one")
    if arguments.config is None:
        raise UsageError("--compile needs a model to compile: name it with --config FILE")
    arguments.config = str(parse_place("--config", arguments.config))
    target = find_target(arguments.compile)
    if arguments.out:
        check_writable(*(arguments.out / name for name in ("report.txt", "timeline.png", "trace.json")))
    if arguments.save_hlo:
        check_writable(arguments.save_hlo / "POLICY.hlo")
    overrides = [arguments.run, *arguments.overrides] if arguments.run else []
    options = dict(map(_option, arguments.option))
    variants = variants_of(arguments.policies, overrides)
    traced = read_traced(arguments.trace) if arguments.trace else None
    chosen = variant_of(arguments.config, overrides, variants, traced.has_tasks) if traced else None
    compiled = compile_variants(target, arguments.config, variants, options, arguments.save_hlo)
    measured = measure(traced, next(each for each in compiled if each.variant == chosen)) if traced else None
    parts = [describe_measured(measured)] if measured else []
    text = "\n".join([*map(describe, compiled), *parts, compare(compiled), "", assumptions(target)])
    print(text)
    if arguments.save_hlo:
        upload(arguments.save_hlo)
    if arguments.out:
        _write(arguments.out, text, f"One training step, estimated for {target.name}", compiled, measured)


def _option(text: str) -> tuple[str, Value]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option {text} has no value: write --option {text}=true")
    return name, {"true": True, "false": False}.get(value.lower(), int(value) if value.isdecimal() else value)


def _write(folder: Path, text: str, title: str, variants: list[Compiled], measured: TracedStep | None) -> None:
    timelines, scales = {}, {}
    for each in variants:
        if each.predicted:
            timelines[f"{each.variant}, predicted"] = predicted_bars(each.predicted)
        timelines[f"{each.variant}, compiled"] = compiled_bars(each.replay)
        if measured and measured.compiled is each:
            timelines[name := f"{each.variant}, measured"] = measured_bars(measured.operations)
            if not 0.5 < measured.ratio < 2:  # another machine: on a common axis one of them would be unreadable
                scales[name] = measured.ratio
    folder.mkdir(parents=True, exist_ok=True)
    facts = "".join(f"\n{name}: {value}" for name, value in origin().items())
    (folder / "report.txt").write_text(f"{text}\n{facts}\n", encoding="utf-8")
    write_trace(timelines, folder / "trace.json")
    try:
        draw(timelines, folder / "timeline.png", title + " and measured" * (measured is not None), scales)
    except PlotError as error:
        print(f"no timeline.png: {error}")
    upload(folder)
    print(f"wrote {shown(str(folder))}")


if __name__ == "__main__":
    run_command(main)
