"""The command `python -m moe_jax.generate`, implemented in `cli/generate.py`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moe_jax.cli.generate", run_name="__main__")
