"""python -m moe_jax.train --config FILE [section.key=value …]"""

import argparse
from pathlib import Path

import jax

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import run_command
from moe_jax.train import processes


def main() -> None:
    """Read the command line, train, and leave a sample and a report in the run's folder."""
    parser = argparse.ArgumentParser(prog="python -m moe_jax.train", description="Train a Mixture-of-Experts model.")
    parser.add_argument("--config", type=Path, help="YAML file, or the folder of an earlier run")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    processes.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    processes.initialize(processes.options_from(arguments), config.mesh.cpu_devices)
    with processes.fail_fast():
        if arguments.dry_run:
            from moe_jax.train.dry_run import describe

            print(describe(config))
        else:
            _train(config)


def _train(config: Config) -> None:
    from moe_jax.train.loop import train

    state = train(config)
    run = Path(config.log.dir)
    if config.log.sample_tokens and jax.process_count() == 1:  # sampling runs on one device of one process
        from moe_jax.train.sample import write_sample

        print(write_sample(config, state["params"], run))
    if processes.is_main_process():
        from moe_jax.report import write_report

        print(f"report: {write_report(run)}")


if __name__ == "__main__":
    run_command(main)
