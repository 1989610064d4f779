"""Gradients as vectors and chunks: nothing lost, nothing summed that no other device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.zero import unsharded_specs
from moe_jax.step.scheduled.reduce_groups import Reduction

# Per device. Two large matrices, one of them an expert's; small gradients of both kinds.
SHAPES = {
    "experts": {"bias": (4, 8), "up": (4, 1000, 300)},
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
def test_chunks_cover_every_vector_once_and_in_order(mesh, bucket_cap_mb):
    reduction = reduction_of(mesh, bucket_cap_mb)
    vectors = reduction.flatten(gradients())
    chunks = [reduction.take(vectors, number) for number in range(len(reduction.chunks))]
    np.testing.assert_array_equal(np.concatenate(chunks), np.concatenate(vectors))
    if bucket_cap_mb is not None:
        assert max(chunk.nbytes for chunk in chunks) <= bucket_cap_mb * 1e6


@every_mesh
@every_limit
def test_each_shared_gradient_takes_the_sum_of_its_own_elements(mesh, bucket_cap_mb):
    """Sums that are 3 times the gradient: they come back in place, and what no other device shares stays as it is."""
    reduction, grads = reduction_of(mesh, bucket_cap_mb), gradients()
    vectors = reduction.flatten(grads)
    sums = [3 * reduction.take(vectors, number) for number in range(len(reduction.chunks))]
    restored = reduction.restore(grads, sums)
    expert_factor = 3 if mesh["data"] > 1 else 1
    for name, grad in grads.items():
        factor = expert_factor if name == "experts" else 3
        jax.tree.map(lambda x, y, factor=factor: np.testing.assert_array_equal(x, factor * y), restored[name], grad)


@every_mesh
def test_every_chunk_is_summed_over_the_axes_that_its_gradients_are_whole_on(mesh):
    reduction, grads = reduction_of(mesh, 1.0), gradients()
    numbered = dict(enumerate(jax.tree.leaves(SPECS)))
    axes_of = {number: vector.over.others for vector in reduction.vectors for number in vector.leaves}
    for number, spec in numbered.items():
        whole_on = {axis for axis in (Axis.DATA, Axis.EXPERT) if axis not in spec and mesh[axis] > 1}
        assert set(axes_of.get(number, ())) == whole_on, jax.tree.leaves(grads)[number].shape
    for number, chunk in enumerate(reduction.chunks):
        assert reduction.over(number) == reduction.vectors[chunk.group].over


def test_a_single_device_sums_nothing():
    reduction, grads = reduction_of({}, None), gradients()
    assert reduction.vectors == ()
    assert reduction.chunks == ()
    restored = reduction.restore(grads, [])
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, restored, grads))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("data 8", [["bias", "norm", "scale"], ["up"], ["out"]]),
        ("2 × 4", [["bias"], ["up"], ["norm", "scale"], ["out"]]),
        ("expert 8", [["norm", "scale"], ["out"]]),
    ],
)
def test_small_gradients_travel_together(mesh, expected):
    """One sum for all norms and scales of a block, not one each: starting a collective costs time."""
    paths = [path for path, _ in jax.tree.leaves_with_path(SHAPES, is_leaf=is_shape)]
    vectors = reduction_of(MESHES[mesh], None).vectors
    assert [[paths[number][-1].key for number in vector.leaves] for vector in vectors] == expected
