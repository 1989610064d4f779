"""Programs of tests, each looked at before it runs."""

from typing import Any

import jax
from jax.stages import Wrapped

from moe_jax.measure.races import check_races

LARGE = 2_500_000  # characters of a program, above which XLA's older emitters, which `conftest.py` chooses, are slower


def run_checked(program: Wrapped, *arguments: Any) -> Any:
    """What a jitted function returns, on the host, if its collectives cannot run into each other."""
    lowered = program.lower(*arguments)
    compiled = lowered.compile({"xla_cpu_use_fusion_emitters": True} if len(lowered.as_text()) > LARGE else None)
    check_races(compiled.as_text() or "")
    return jax.device_get(compiled(*arguments))
