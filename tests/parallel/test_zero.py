"""Arrays cut over the devices that hold the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.zero import ShardSpec, cuts_of
from tests.parallel.per_device import on_mesh

DATA = (Axis.DATA,)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((6, 16), (None, None), ShardSpec(1, BATCH_AXES)),
        ((16, 64), (None, None), ShardSpec(0, BATCH_AXES)),
        ((6, 16), ("expert", None), ShardSpec(1, DATA)),
        ((8, 6), ("expert", None), ShardSpec(1, DATA)),
        ((8, 16), (("context", "expert"), None), ShardSpec(1, DATA)),
        ((6, 3), (None, None), ShardSpec(0, DATA)),
        ((8, 3), ("pipeline", None), ShardSpec()),
        ((3, 5), (None, None), ShardSpec()),
    ],
)
def test_a_whole_dimension_is_cut_over_as_many_devices_as_divide_it(shape, spec, expected):
    mesh = {"data": 2, "expert": 4, "tensor": 1, "context": 1}
    assert cuts_of(jax.ShapeDtypeStruct(shape, "float32"), PartitionSpec(*spec), mesh) == expected


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "cut", [ShardSpec(0, BATCH_AXES), ShardSpec(1, (Axis.EXPERT,)), ShardSpec(2, DATA), ShardSpec()], ids=str
)
def test_parts_are_those_of_the_flat_rows_and_make_up_the_whole(cut, platform):
    x = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)
    ranks = {(): 1, DATA: 2, (Axis.EXPERT,): 4, BATCH_AXES: 8}[cut.axes]

    def body(_: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = cut.local_shard(jnp.asarray(x))
        rank = jax.lax.axis_index(cut.axes) if cut.axes else 0
        row = cut.by_rank(jnp.asarray(x), ranks).reshape(ranks, -1)[rank]
        assert own.shape == cut.shape(x.shape, ranks)
        return (
            jnp.array_equal(row, own.ravel())[None],
            cut.all_gather(own, platform)[None],
            cut.all_gather(cut.reduce_scatter(jnp.asarray(x), platform), platform)[None],
        )

    same, whole, total = on_mesh(body, PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES), data=2, expert=4)(
        np.zeros(8)
    )
    assert same.all()
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (8, *x.shape)))
    np.testing.assert_array_equal(total, np.broadcast_to(ranks * x, (8, *x.shape)))
