"""Entry point of `python -m moe_jax.measure`, which runs `cli/measure.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.measure", run_name="__main__")
