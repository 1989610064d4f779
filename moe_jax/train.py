"""The command `python -m moe_jax.train`, which is `cli/train.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.train", run_name="__main__")
