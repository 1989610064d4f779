"""The command `python -m moe_jax.plan`, which is `cli/plan.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.plan", run_name="__main__")
