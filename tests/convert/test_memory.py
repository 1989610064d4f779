"""What reading takes besides the parameters: less than 1.3 of the largest tensor."""

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.config import MeshConfig, ModelConfig, MoEConfig
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.files import INDEX, Weights
from moe_jax.convert.quantized import BlockFp8, Mxfp4
from moe_jax.convert.write import write_model
from moe_jax.models.parameters import param_shapes
from tests.convert.golden import read

MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=256,
    num_layers=2,
    moe=MoEConfig(num_experts=8, intermediate_size=512, capacity_factor=None),
)
LARGEST = 2 * MODEL.vocab_size * MODEL.hidden_size  # bytes of the embedding, in bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_memory_holds_one_tensor_besides_the_parameters(fused, tmp_path):
    """With all experts of a block in one tensor, too, of which one expert is read at a time."""
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), param_shapes(MODEL))
    write_model(tmp_path / "hf", MODEL, FAMILIES["mixtral"], params, "bfloat16", 64, tmp_path, most_bytes=2 * LARGEST)
    if fused:
        _fuse(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    tracemalloc.start()
    try:
        found = read(tmp_path / "hf", MeshConfig(data=1, expert=8))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held > sum(leaf.nbytes for leaf in jax.tree.leaves(found)), "what is read stays where it is"
    assert peak - held < 1.3 * LARGEST
    assert all(jnp.all(leaf == 0.5) for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantised_tensor_is_dequantised_in_parts(method, tmp_path):
    """Less than 1.3 of its numbers in float32, codes and scales included."""
    codes = np.full((1, 1024, 64, 16), 0x66, np.uint8)  # 4 and 4, each times 1
    found: dict[str, np.ndarray] = {"w_blocks": codes, "w_scales": np.full(codes.shape[:-1], 127, np.uint8)}
    if method == "fp8":
        matrix = np.full((2048, 1024), 4, jnp.float8_e4m3fn)
        found = {"w": matrix, "w_scale_inv": np.ones((16, 8), np.float32)}
    save_file(found, tmp_path / "model.safetensors")
    del found
    with Weights(tmp_path, BlockFp8((128, 128)) if method == "fp8" else Mxfp4()) as weights:
        tracemalloc.start()
        try:
            whole = weights["w"][tuple(slice(0, size) for size in ([1] * (method == "mxfp4") + [2048, 1024]))]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (whole == 4).all()
    assert whole.nbytes < peak < 1.3 * whole.nbytes


def test_memory_holds_one_dequantised_tensor_besides_the_parameters(tmp_path):
    """For a model whose largest tensor, the embedding, is quantised, too."""
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), param_shapes(MODEL))
    write_model(tmp_path / "hf", MODEL, FAMILIES["mixtral"], params, "float32", 64, tmp_path)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in [name for name, x in tensors.items() if x.ndim == 2]:
        scales = np.full([-(-size // 128) for size in tensors[name].shape], 0.125, np.float32)
        tensors |= {name: np.full(tensors[name].shape, 4, jnp.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    del tensors
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    try:
        found = read(tmp_path / "hf")
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - held < 1.3 * 4 * MODEL.vocab_size * MODEL.hidden_size
    assert all(jnp.all(leaf == 0.5) for leaf in jax.tree.leaves(found))


def _fuse(folder: Path) -> None:
    """Each tensor in a file of its own; the values are all alike."""
    with Weights(folder) as weights:
        tensors = {name.replace("block_sparse_moe", "mlp"): weights[name][:] for name in weights.names()}
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(MODEL.num_layers):
        prefix, experts, hidden = (
            f"model.layers.{layer}.mlp.experts.",
            MODEL.moe.num_experts,
            MODEL.moe.intermediate_size,
        )
        kept[f"{prefix}gate_up_proj"] = np.full((experts, 2 * hidden, MODEL.hidden_size), 0.5, jnp.bfloat16)
        kept[f"{prefix}down_proj"] = np.full((experts, MODEL.hidden_size, hidden), 0.5, jnp.bfloat16)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    index = {name: f"{number}.safetensors" for number, name in enumerate(kept)}
    for name, file in index.items():
        save_file({name: kept[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
