"""The command `python -m moe_jax.train`, implemented in `cli/train.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.train", run_name="__main__")
