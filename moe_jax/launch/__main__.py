"""The command `python -m moe_jax.launch`, which is `cli/launch.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.launch", run_name="__main__")
