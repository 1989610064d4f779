"""Memory that an operation is about to write."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.all_to_all import ragged
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.uninitialized import uninitialized


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_it_has_the_shape_asked_for_and_the_type_of_what_is_there(platform: str) -> None:
    found = uninitialized((3, 5), jnp.zeros((2, 4), jnp.bfloat16), jnp.arange(2), platform)
    assert found.shape == (3, 5)
    assert found.dtype == jnp.bfloat16


def test_on_tpus_each_is_allocated_after_what_is_there_and_none_is_shared() -> None:
    def two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = (uninitialized((16, 8, 128), x * 2, jnp.arange(4) + i, "tpu") for i in range(2))
        return first, second

    text = _for_tpus(two, jnp.ones((4, 8, 128), jnp.bfloat16))
    lines = [line for line in text.splitlines() if 'kernel_name = "uninitialized"' in line]
    assert len(lines) == 2
    assert all("(tensor<4x8x128xbf16>, tensor<1x4xi32>) -> tensor<16x8x128xbf16>" in line for line in lines)
    operands = {re.search(r"\(([^)]*)\)", line.partition("@tpu_custom_call")[2])[1] for line in lines}  # type: ignore[index]
    assert len(operands) == 2  # or XLA makes one of two alike


def test_no_gradient_passes() -> None:
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x) + jnp.sum(0 * uninitialized((16, 8, 128), x, jnp.arange(4), "tpu"))

    assert "uninitialized" in _for_tpus(jax.grad(total), jnp.ones((4, 8, 128)))


def test_buffers_of_ragged_exchanges_are_such() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (Axis.EXPERT,))
    count_PE = jnp.full((2, 4), 3, jnp.int32)

    def lanes(rows_SD: jax.Array) -> ragged.Lanes:
        return ragged.to_lanes(rows_SD.reshape(-1, 8, 128), count_PE, ragged.Widths(4, 2), Axis.EXPERT, "tpu")

    on_mesh = jax.shard_map(
        lanes, mesh=mesh, in_specs=jax.P(Axis.EXPERT), out_specs=jax.P(Axis.EXPERT), check_vma=False
    )
    text = _for_tpus(on_mesh, jnp.ones((24, 1024), jnp.bfloat16))
    assert text.count('kernel_name = "uninitialized"') == 2  # of the lanes, and of the rows that overflow them
    assert "AllocateBuffer" not in text


def _for_tpus(function, *args: jax.Array) -> str:  # type: ignore[no-untyped-def]
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
