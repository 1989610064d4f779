"""The command that trains a model.

python -m moe_jax.train --config FILE [section.key=value …]
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports and traces create no garbage, and collections would take 0.4 s until the first step

import logging
from pathlib import Path

import jax

from moe_jax.checkpoint.files import first_line
from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_draft
from moe_jax.distributed import processes
from moe_jax.distributed.failures import fail_fast, run_and_exit
from moe_jax.distributed.heartbeat import report_no_mesh, report_start
from moe_jax.environment import lose_output_on_full_disk
from moe_jax.errors import CommandParser, MeshError, UserError
from moe_jax.files.local_copy import local_path, upload
from moe_jax.files.places import place
from moe_jax.paths import shown
from moe_jax.plan.planner import PlanError
from moe_jax.report import write_report
from moe_jax.report.alarms import alarm_text
from moe_jax.run.describe import dry_run, table
from moe_jax.run.loop import train
from moe_jax.run.resolve_auto import resolve_auto
from moe_jax.run.run_dir import check_is_not_a_copy
from moe_jax.run.sample import write_sample
from moe_jax.step.context import State
from moe_jax.step.expert_placement import params_in_order


def main() -> None:
    """Parse the command line, train, and write a sample and a report into the run's folder."""
    parser = CommandParser(
        prog="python -m moe_jax.train",
        description="Train a Mixture-of-Experts model.",
        epilog="Example: --config configs/shakespeare_cpu.yaml train.steps=200. Settings: moe_jax/config/sections/.",
    )
    parser.add_argument("--config", type=place, required=True, help="YAML file, or the folder of an earlier run")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and stop")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's"
    )
    processes.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    if not arguments.dry_run:
        lose_output_on_full_disk()
    draft = load_draft(arguments.config, arguments.overrides)
    check_is_not_a_copy(arguments.config, draft.log.dir, arguments.overrides)
    if not draft.open:
        draft.choose()  # raises ConfigError early if the config is invalid
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax and jax warn about intended behaviour
    report_start()
    processes.initialize(
        processes.options_from(arguments),
        draft.mesh.cpu_devices,
        in_background=draft.may_wait_in_threads,
        quick_compile=draft.train.quick_compile,
    )
    with fail_fast():
        try:
            config, chosen = resolve_auto(draft)
        except (MeshError, PlanError):
            report_no_mesh()
            raise
        if arguments.dry_run:
            _print_once(table(chosen | dry_run(config)))
            return
        if chosen:
            _print_once(table(chosen))
        state = train(config)
        if int(state["step"]) == config.train.steps:
            _write_results(config, state)


def _print_once(text: str) -> None:
    """Print a text in the main process."""
    if processes.is_main_process():
        print(text, flush=True)


def _write_results(config: Config, state: State) -> None:
    """Write the report, then a sample, and the report again with it: the run has succeeded, whatever fails here."""
    if not processes.is_main_process():
        return
    run = local_path(config.log.dir)
    report = _report(run)
    if config.log.sample_tokens and jax.process_count() == 1:  # sampling uses one device of a single process
        try:
            text = write_sample(config, params_in_order(state, Stages.of(config)), run)
        except (UserError, OSError, jax.errors.JaxRuntimeError) as error:  # e.g. too little memory on one device
            print(f"warning: no text is sampled ({shown(first_line(error))}): do it by python -m moe_jax.generate")
        else:
            print(shown(text))
            report = _report(run)
    print(report)
    upload(run)


def _report(run: Path) -> str:
    """Write the report, and return the lines about it for the terminal."""
    try:
        return "\n".join(filter(None, [f"report: {shown(str(write_report(run)))}", alarm_text(run)]))
    except UserError as error:
        return f"no report: {shown(str(error))}"


if __name__ == "__main__":
    run_and_exit(main)
