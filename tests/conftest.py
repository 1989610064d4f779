"""Eight simulated CPU devices for every test, shapes checked at run time, and compiled programs kept for the next run.

Programs lie in .pytest_cache/programs, which both workers, the processes that tests start, and later runs share. To
compile all of them again: pytest --cache-clear.
"""

import os
from importlib.metadata import version

from tests.programs_folder import programs_folder

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "64"  # threads, as many as eight simulated devices get if they may wait in the background
# Tests compile more than they compute: LLVM's optimisations would take most of their time, and before jax 0.11 XLA's
# newer emitters two thirds of what is left. To split a program into modules for threads of a compiler takes a sixth of
# what is left then, the lines of Python that each operation comes from a twelfth, and to verify XLA's own passes, which
# `test_smoke.py` does, a tenth.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] += " --xla_disable_hlo_passes=hlo-verifier"
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["MOE_JAX_CHECKED_XLA_FLAGS"] = os.environ["XLA_FLAGS"]  # or each command starts a process to check them
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs_folder())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

# the collector would take a tenth of the time: what is imported stays, and traced programs make many objects
gc.freeze()
gc.set_threshold(100_000, 50, 50)

pytest_plugins = ("tests.cost",)

jax.config.update("jax_num_cpu_devices", 8)
_jaxtyped = jaxtyping.jaxtyped


def _but_inner(**how: Any) -> Callable[[Any], Any]:
    """Leave out functions inside of others: to decorate them at each call is a tenth of tracing."""
    checked = _jaxtyped(**how)
    return lambda function: function if "<locals>" in function.__qualname__ else checked(function)


jaxtyping.jaxtyped = _but_inner
jaxtyping.install_import_hook(
    ["moe_jax.models", "moe_jax.parallel", "moe_jax.step.losses", "moe_jax.step.plain"], "beartype.beartype"
)


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    assert jax.device_count() == 8, f"tests need 8 simulated devices, found {jax.device_count()}"


@pytest.fixture(autouse=True)
def _programs_are_kept() -> Iterator[None]:
    """Again, where a test has stopped jax's cache."""
    yield
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    """For tests that compare results of several programs bit for bit, or within narrow bounds."""
    from tests.compiled import exact_programs

    with exact_programs():
        yield
