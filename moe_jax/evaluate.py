"""The command `python -m moe_jax.evaluate`, implemented in `cli/evaluate.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.evaluate", run_name="__main__")
