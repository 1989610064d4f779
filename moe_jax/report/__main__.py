"""The command `python -m moe_jax.report`, implemented in `cli/report.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.report", run_name="__main__")
