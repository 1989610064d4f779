"""Gradients in groups and buckets: nothing lost, nothing summed that no other device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.zero import ShardSpec, shard_specs_of, unsharded_specs
from moe_jax.step.scheduled import reduce_groups
from moe_jax.step.scheduled.reduce_groups import Reduction
from tests.step.one_step import assert_is_the_references_step, config_of_settings

# Per device. Two large matrices, one of them an expert's; small gradients of both kinds.
SHAPES = {
    "experts": {"bias": (4, 8), "up": (4, 1001, 300)},
    "norm": (300,),
    "out": (1100, 1000),
    "scale": (),
}
SPECS = {
    "experts": {"bias": PartitionSpec(Axis.EXPERT), "up": PartitionSpec(Axis.EXPERT, None, None)},
    "norm": PartitionSpec(None),
    "out": PartitionSpec(),
    "scale": PartitionSpec(),
}
MESHES = {
    "data 8": {"data": 8, "expert": 1},
    "2 × 4": {"data": 2, "expert": 4},
    "expert 8": {"data": 1, "expert": 8},
}


def is_shape(leaf: object) -> bool:
    return isinstance(leaf, tuple)


def reduction_of(mesh: dict[str, int], bucket_cap_mb: float | None) -> Reduction:
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=is_shape)
    sizes = {"data": 1, "expert": 1, "tensor": 1, "context": 1} | mesh
    return Reduction.of(shapes, SPECS, unsharded_specs(SPECS), sizes, bucket_cap_mb)


def gradients() -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda shape: jnp.array(rng.normal(size=shape), jnp.float32), SHAPES, is_leaf=is_shape)


every_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
every_limit = pytest.mark.parametrize("bucket_cap_mb", [None, 0.5, 1.234, 50.0])


@every_mesh
@every_limit
def test_buckets_cover_every_group_once_and_in_order(mesh, bucket_cap_mb):
    reduction = reduction_of(mesh, bucket_cap_mb)
    packed = reduction.pack(gradients())
    buckets = [reduction.take(packed, number)[0].ravel() for number in range(len(reduction.buckets))]
    np.testing.assert_array_equal(np.concatenate(buckets), np.concatenate([array.ravel() for array in packed]))
    if bucket_cap_mb is not None:
        assert max(bucket.nbytes for bucket in buckets) <= bucket_cap_mb * 1e6


@every_mesh
@every_limit
def test_each_shared_gradient_takes_the_sum_of_its_own_elements(mesh, bucket_cap_mb):
    """Sums that are 3 times the gradient: they come back in place, and what no other device shares stays as it is."""
    reduction, grads = reduction_of(mesh, bucket_cap_mb), gradients()
    packed = reduction.pack(grads)
    sums = [3 * reduction.take(packed, number)[0] for number in range(len(reduction.buckets))]
    restored = reduction.unpack(grads, sums)
    expert_factor = 3 if mesh["data"] > 1 else 1
    for name, grad in grads.items():
        factor = expert_factor if name == "experts" else 3
        jax.tree.map(lambda x, y, factor=factor: np.testing.assert_array_equal(x, factor * y), restored[name], grad)


@every_mesh
def test_every_bucket_is_summed_over_the_axes_that_its_gradients_are_whole_on(mesh):
    reduction, grads = reduction_of(mesh, 1.0), gradients()
    numbered = dict(enumerate(jax.tree.leaves(SPECS)))
    axes_of = {leaf: group.axes.others for group in reduction.groups for leaf in group.leaves}
    for number, spec in numbered.items():
        whole_on = {axis for axis in (Axis.DATA, Axis.EXPERT) if axis not in spec and mesh[axis] > 1}
        assert set(axes_of.get(number, ())) == whole_on, jax.tree.leaves(grads)[number].shape
    for number, bucket in enumerate(reduction.buckets):
        assert reduction.axes(number) == reduction.groups[bucket.group].axes


@pytest.mark.parametrize("mesh", [MESHES["data 8"], MESHES["2 × 4"]], ids=["data 8", "2 × 4"])
@pytest.mark.parametrize("bucket_cap_mb", [None, 0.02, 0.07, 0.5, 2.6, 10.0, 50.0])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_rank_gets_its_own_shard_of_the_sum(mesh, bucket_cap_mb, dim):
    """Each rank's part of 3 times every bucket: together they are its shards of 3 times the gradients."""
    sizes = {"data": 1, "expert": 1, "tensor": 1, "context": 1} | mesh
    shape = tuple(64 if place == dim else size for place, size in enumerate((24, 40, 256)))
    grads = {"large": jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape), "norm": jnp.arange(64.0)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grads)
    specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
    shard_specs = shard_specs_of(shapes, specs, sizes)
    shard_specs["large"] = ShardSpec(dim, shard_specs["norm"].axes)
    reduction = Reduction.of(shapes, specs, shard_specs, sizes, bucket_cap_mb)
    packed = reduction.pack(grads)
    for rank in range(8):

        def part(bucket: int, rank: int = rank) -> jax.Array:
            x, spec = reduction.take(packed, bucket)
            if bucket_cap_mb is not None:
                assert x.nbytes <= bucket_cap_mb * 1e6
            return 3 * (x[rank] if spec is None else own_shard(x, spec.dim, rank))

        restored = reduction.unpack(grads, [part(bucket) for bucket in range(len(reduction.buckets))])
        np.testing.assert_array_equal(restored["large"], 3 * own_shard(grads["large"], dim, rank))
        np.testing.assert_array_equal(restored["norm"], 3 * own_shard(grads["norm"], 0, rank))


def own_shard(x: jax.Array, dim: int, rank: int) -> jax.Array:
    return jnp.split(x, 8, dim)[rank]


@pytest.mark.parametrize(
    ("dim", "bucket_cap_mb", "taken"),
    [
        (1, None, (96, 64, 256)),  # the whole gradient as it is
        (1, 0.6, (8, 64, 256)),  # whole indices of the first dimension
        (1, 0.04, (8, 4, 256)),  # rows of one of them: [ranks, rows, columns]
        (0, 0.3, (8, 32, 256)),  # rows of each rank's part
    ],
)
def test_a_large_gradient_keeps_its_shape(dim, bucket_cap_mb, taken):
    """Flat arrays would cost compilers of TPUs two copies of each bucket, and padding."""
    shapes = {"up": jax.ShapeDtypeStruct((96, 64, 256), jnp.float32)}
    specs, sizes = {"up": PartitionSpec()}, {"data": 8, "expert": 1, "tensor": 1, "context": 1}
    reduction = Reduction.of(shapes, specs, {"up": ShardSpec(dim, (Axis.DATA,))}, sizes, bucket_cap_mb)
    x, spec = reduction.take(reduction.pack({"up": jnp.zeros((96, 64, 256))}), 0)
    assert x.shape == taken
    assert spec is not None


@pytest.mark.parametrize(("powers_of_two", "rows"), [(True, [64] * 4), (False, [80, 88, 88])])
def test_slices_of_tpus_have_a_power_of_two_of_rows(powers_of_two, rows):
    """An odd number of tiles in a large slice is scattered synchronously there."""
    shapes = {"head": jax.ShapeDtypeStruct((2048, 50304), jnp.float32)}
    specs, sizes = {"head": PartitionSpec()}, {"data": 2, "expert": 4, "tensor": 1, "context": 1}
    spec = {"head": ShardSpec(0, (Axis.DATA, Axis.EXPERT))}
    reduction = Reduction.of(shapes, specs, spec, sizes, 200, powers_of_two)
    packed = reduction.pack({"head": jax.ShapeDtypeStruct((2048, 50304), jnp.float32)})
    taken = [jax.eval_shape(lambda x, n=n: reduction.take([x], n)[0], *packed) for n in range(len(reduction.buckets))]
    assert [x.shape for x in taken] == [(8, each, 50304) for each in rows]


@pytest.mark.parametrize(
    ("settings", "bucket_cap_mb"),
    [
        ("mesh.data=2 mesh.expert=2 optimizer.zero=3 schedule.policy=unified schedule.microbatches=2", 0.003),
        ("mesh.data=2 mesh.expert=2 schedule.policy=vanilla schedule.weight_grad=greedy", 0.0007),
        ("mesh.data=4 optimizer.zero=1 schedule.policy=vanilla exchange.reduction=ring", 0.0007),
    ],
)
def test_a_step_sums_large_gradients_in_their_shape(settings, bucket_cap_mb, monkeypatch):
    """The test's gradients count as large: rows and experts, scattered or not."""
    monkeypatch.setattr(reduce_groups, "_SMALL", 64)
    more = f" schedule.grad_reduce=bucketed schedule.bucket_cap_mb={bucket_cap_mb}"
    assert_is_the_references_step(config_of_settings(settings + more))


def test_a_single_device_sums_nothing():
    reduction, grads = reduction_of({}, None), gradients()
    assert reduction.groups == ()
    assert reduction.buckets == ()
    restored = reduction.unpack(grads, [])
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, restored, grads))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("data 8", [["up"], ["out"], ["bias", "norm", "scale"]]),
        ("2 × 4", [["up"], ["out"], ["norm", "scale"], ["bias"]]),
        ("expert 8", [["out"], ["norm", "scale"]]),
    ],
)
def test_small_gradients_travel_together(mesh, expected):
    """One sum for all norms and scales of a block, not one each: starting a collective costs time. It is the last."""
    paths = [path for path, _ in jax.tree.leaves_with_path(SHAPES, is_leaf=is_shape)]
    groups = reduction_of(MESHES[mesh], None).groups
    assert [[paths[leaf][-1].key for leaf in group.leaves] for group in groups] == expected
