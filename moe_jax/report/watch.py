"""Periodic updates of the page while a run is still training."""

import time
from pathlib import Path

from moe_jax.config.yaml_io import load_config
from moe_jax.report.page import write_report
from moe_jax.telemetry.run_log import read_metrics


def watch(run: Path, every_s: int) -> None:
    """Write the page every `every_s` seconds until the run's last step, or until Ctrl-C.

    Browsers reload the page as often. If the run has no records yet, wait for them. Raises the errors of
    `write_report`, and ConfigError if the run's config cannot be read.
    """
    if not _has_ended(run):
        print(f"renewing {run / 'report.html'} every {every_s} s until the last step; Ctrl-C stops", flush=True)
    try:
        while not _has_ended(run):
            if read_metrics(run):
                write_report(run, refresh_s=every_s)
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass
    if read_metrics(run):
        print(f"wrote {write_report(run)}")


def _has_ended(run: Path) -> bool:
    """Whether the run has validated after its last step."""
    records, steps = read_metrics(run), load_config(run).train.steps
    return any("validation_loss" in record and record["step"] >= steps for record in records)
