"""`python -m moe_jax.report RUN`: write RUN/report.html."""

import argparse
from pathlib import Path

from moe_jax.errors import run_command
from moe_jax.report import write_report


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_jax.report",
        description="Write RUN/report.html: key numbers, curves, expert load, a text sample and the config of a run, "
        "on one page that can be sent around by itself.",
        epilog="example: python -m moe_jax.report runs/default",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run (its log.dir); it may still be running")
    print(f"wrote {write_report(parser.parse_args().run)}")


if __name__ == "__main__":
    run_command(main)
