"""Arrays sharded over the devices that hold the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.parallel.eight_bits import quantize
from moe_jax.parallel.gathered_params import ParamGather, flat_shards, from_flat, gather_flat, gathered_together
from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.zero import ShardSpec, shard_specs_of
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
    assert shard_specs_of(jax.ShapeDtypeStruct(shape, "float32"), PartitionSpec(*spec), mesh) == expected


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "shard_spec", [ShardSpec(0, BATCH_AXES), ShardSpec(1, (Axis.EXPERT,)), ShardSpec(2, DATA), ShardSpec()], ids=str
)
def test_parts_are_those_of_the_flat_rows_and_make_up_the_whole(shard_spec, platform):
    x = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)
    ranks = {(): 1, DATA: 2, (Axis.EXPERT,): 4, BATCH_AXES: 8}[shard_spec.axes]

    def body(_: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = shard_spec.local_shard(jnp.asarray(x))
        rank = jax.lax.axis_index(shard_spec.axes) if shard_spec.axes else 0
        row = shard_spec.by_rank(jnp.asarray(x), ranks).reshape(ranks, -1)[rank]
        assert own.shape == shard_spec.shape(x.shape, ranks)
        return (
            jnp.array_equal(row, own.ravel())[None],
            shard_spec.all_gather(own, platform)[None],
            shard_spec.all_gather(shard_spec.reduce_scatter(jnp.asarray(x), platform), platform)[None],
        )

    same, whole, total = on_mesh(body, PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES), data=2, expert=4)(
        np.zeros(8)
    )
    assert same.all()
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (8, *x.shape)))
    np.testing.assert_array_equal(total, np.broadcast_to(ranks * x, (8, *x.shape)))


def test_small_arrays_of_equal_axes_share_a_gather_and_arrive_bit_for_bit():
    """Also of several types, as bits."""
    shape, types = (8, 8, 16), ("bfloat16", "float32")
    shard_specs = [ShardSpec(0, BATCH_AXES), ShardSpec(2, BATCH_AXES), ShardSpec(1, DATA), ShardSpec()]
    owns = [ParamGather(shard_spec, dtype, "tpu", dtype) for dtype in types for shard_spec in shard_specs]
    values = np.random.default_rng(0).normal(size=(len(owns), *shape)).astype(np.float32)
    values[:, 0, 0, :2] = np.nan, -0.0
    large = ParamGather(ShardSpec(1, BATCH_AXES), "float32", "tpu", "float32")  # 16 MiB
    together = [(0, 1, 4, 5), (2, 6), (8,)]

    def body(_: jax.Array) -> dict[int, jax.Array]:
        shards = [own.shard_spec.local_shard(jnp.asarray(x)) for own, x in zip(owns, values, strict=True)]
        of_large = large.shard_spec.local_shard(jnp.zeros((2**11, 2**11)))
        assert gathered_together([*owns, large], [*shards, of_large]) == together
        whole = {}
        for numbers in (*together[:2], (0, 1), (5,)):
            some, of_some = [owns[number] for number in numbers], [shards[number] for number in numbers]
            arrays = from_flat(some, gather_flat(some, flat_shards(some, of_some)), [shard.shape for shard in of_some])
            whole |= {number + 10 * len(numbers): x[None] for number, x in zip(numbers, arrays, strict=True)}
        return whole

    wholes = on_mesh(body, PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES), data=2, expert=4)(np.zeros(8))
    assert len(wholes) == 9
    for name, whole in wholes.items():
        expected = np.asarray(jnp.asarray(values[name % 10], owns[name % 10].dtype))
        assert np.asarray(whole).tobytes() == np.broadcast_to(expected, (8, *shape)).tobytes()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("together", [False, True])
def test_experts_arrive_as_the_8_bit_numbers_of_each_shard(dim, together):
    """One array gathered by itself, and two in one vector; a number that is not finite stays in its own matrix."""
    own = ParamGather(ShardSpec(dim, BATCH_AXES), "bfloat16", "tpu", "uint8")
    x = np.random.default_rng(0).normal(size=(16, 16, 24)).astype(np.float32)
    x[3, 0, 0] = np.nan

    def body(_: jax.Array) -> jax.Array:
        shard = own.shard_spec.local_shard(jnp.asarray(x))
        if not together:
            return own.gather(shard)[None]
        flat = gather_flat([own, own], flat_shards([own, own], [shard / 2, shard]))
        return from_flat([own, own], flat, [shard.shape] * 2)[1][None]

    wholes = on_mesh(body, PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES), data=2, expert=4)(np.zeros(8))
    of_shards = [quantize(jnp.asarray(part, "bfloat16"), jnp.float8_e4m3fn, (-2, -1)) for part in np.split(x, 8, dim)]
    expected = np.concatenate([np.asarray(part.wide() * part.scale, np.float32) for part in of_shards], dim)
    np.testing.assert_array_equal(np.asarray(wholes, np.float32), np.broadcast_to(expected, (8, *x.shape)))
    assert np.isfinite(expected).all(axis=(1, 2)).sum() == 15
