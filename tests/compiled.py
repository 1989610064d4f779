"""Programs of tests, each looked at before it runs."""

from typing import Any

import jax
from jax.stages import Wrapped

from moe_jax.measure.races import check_races


def run_checked(program: Wrapped, *arguments: Any) -> Any:
    """What a jitted function returns, on the host, if its collectives cannot run into each other."""
    compiled = program.lower(*arguments).compile()
    check_races(compiled.as_text() or "")
    return jax.device_get(compiled(*arguments))
