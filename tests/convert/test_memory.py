"""What reading takes beside the parameters: less than 1.3 of the largest tensor."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import Mesh, Model, MoE
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.write import write_model
from moe_jax.models.parameters import param_shapes
from tests.convert.golden import read

MODEL = Model(
    vocab_size=8192,
    d_model=256,
    num_layers=2,
    moe=MoE(num_experts=8, hidden_dim=512, capacity_factor=None),
)
LARGEST = 2 * MODEL.vocab_size * MODEL.d_model  # bytes of the embedding, in bfloat16


def test_memory_holds_one_tensor_beside_the_parameters(tmp_path):
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), param_shapes(MODEL))
    write_model(tmp_path / "hf", MODEL, FAMILIES["mixtral"], params, "bfloat16", 64, tmp_path, most_bytes=2 * LARGEST)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    tracemalloc.start()
    try:
        found = read(tmp_path / "hf", Mesh(data=1, expert=8))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held > sum(leaf.nbytes for leaf in jax.tree.leaves(found)), "what is read stays where it is"
    assert peak - held < 1.3 * LARGEST
    assert all(jnp.all(leaf == 0.5) for leaf in jax.tree.leaves(found))
