"""The command `python -m moe_jax.convert`, implemented in `cli/convert.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.convert", run_name="__main__")
