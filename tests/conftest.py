"""Eight simulated CPU devices for every test, and shapes checked at run time."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "64"  # threads, as many as eight simulated devices get if they may wait in the background
# Tests compile more than they compute; LLVM's optimisations would take most of their time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook(["moe_jax.models", "moe_jax.parallel", "moe_jax.train.objective"], "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    assert jax.device_count() == 8, f"tests need 8 simulated devices, found {jax.device_count()}"
