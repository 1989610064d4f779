"""Programs of tests, each looked at before it runs."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.stages import Compiled, Wrapped

from moe_jax.measure.races import check_races
from moe_jax.step.compile import StepProgram

# compiler options that choose XLA's newer emitters; {} where `conftest.py` has not chosen the older ones
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
NEWER_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if OLDER_EMITTERS in os.environ["XLA_FLAGS"] else {}
LARGE = 2_500_000  # characters of a program, above which the older ones are slower


def run_checked(program: Wrapped, *arguments: Any) -> Any:
    """What a jitted function returns, on the host, if its collectives cannot run into each other."""
    lowered = program.lower(*arguments)
    compiled = lowered.compile(NEWER_EMITTERS if len(lowered.as_text()) > LARGE else None)
    check_races(compiled.as_text() or "")
    return jax.device_get(compiled(*arguments))


@contextmanager
def exact_programs() -> Iterator[None]:
    """Compile steps of runs, what `run_checked` does, and what processes do, with XLA's newer emitters.

    Two programs of one function then agree in every bit, and round alike.
    """
    compile_ = StepProgram.compile

    def newer(program: StepProgram) -> Compiled:
        return compile_(dataclasses.replace(program, options={**program.options, **NEWER_EMITTERS}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProgram, "compile", newer)
        flags = os.environ["XLA_FLAGS"].replace(OLDER_EMITTERS, "").strip()
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("MOE_JAX_CHECKED_XLA_FLAGS", flags)
        patch.setattr(sys.modules[__name__], "LARGE", 0)
        yield
