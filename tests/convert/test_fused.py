"""Experts that all are in two tensors of a block, as transformers 5 holds them: the same parameters."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.config import MeshConfig
from moe_jax.convert.files import Weights
from moe_jax.convert.hf_config import ConvertError
from moe_jax.convert.source import open_model
from tests.convert.golden import GOLDEN, changed, model_of, read

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "deepseek_v3", "deepseek_v2", "minimax_m2", "ernie4_5_moe"]
FAMILIES += ["qwen3_next", "qwen3_5_moe_text", "phimoe"]
_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PART = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def fuse(name: str, folder: Path) -> Path:
    """A golden model in one file, experts fused: rows of gates in front of those of `up`."""
    made = changed(name, folder)
    with Weights(GOLDEN / name) as weights:
        tensors = {each: weights[each][:].astype(np.float32) for each in weights.names()}
    for file in made.glob("model*"):
        file.unlink()
    experts: dict[str, dict[str, list[np.ndarray]]] = {}
    whole = {}
    for each in sorted(tensors, key=lambda text: [int(part) if part.isdigit() else 0 for part in text.split(".")]):
        if match := _EXPERT.fullmatch(each):
            parts = experts.setdefault(match[1], {})
            parts.setdefault(_PART.get(match[3], match[3]), []).append(tensors[each])
        else:
            newer = each.replace("block_sparse_moe.", "mlp.").replace("mlp.moe_statics", "mlp.gate.moe_statics")
            whole[newer] = tensors[each]
    for prefix, parts in experts.items():
        gate, up, down = (np.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        whole[f"{prefix}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        whole[f"{prefix}mlp.experts.down_proj"] = down
    save_file(whole, made / "model.safetensors")
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_experts_are_the_same_parameters(name, tmp_path):
    """On one device, and each of four reads its part."""
    folder = fuse(name, tmp_path)
    with open_model(folder, model_of(name)):
        pass
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(GOLDEN / name))
    cut = read(folder, MeshConfig(data=1, expert=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, cut, read(GOLDEN / name))


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_2"])
def test_nemotron_h_has_other_names_and_experts_without_gates(name, tmp_path):
    """Its models without experts, too, as transformers 5 writes them if it is not to write the original names."""
    made, fused = changed(name, tmp_path), {}
    tensors = {old.replace("backbone.", "model."): x for old, x in load_file(made / "model.safetensors").items()}
    for old in [old for old in tensors if ".experts." in old]:
        block, rest = old.split(".experts.")
        fused.setdefault(f"{block}.experts.{rest.split('.')[1]}", {})[int(rest.split(".")[0])] = tensors.pop(old)
    tensors |= {new: np.stack([own[expert] for expert in sorted(own)]) for new, own in fused.items()}
    save_file(tensors, made / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read(made), read(GOLDEN / name))


@pytest.mark.parametrize("family", ["granitemoe", "granitemoehybrid"])
def test_granite_has_other_names_for_its_fused_tensors(family, tmp_path):
    made = changed(family, tmp_path)
    newer = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    newer["router.layer.weight"] = "router.weight"
    tensors = load_file(made / "model.safetensors")
    for older, name in newer.items():
        for each in [each for each in tensors if each.endswith(f"block_sparse_moe.{older}")]:
            tensors[each.replace(older, name)] = tensors.pop(each)
    save_file(tensors, made / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read(made), read(GOLDEN / family))


def test_a_fused_tensor_of_another_shape_is_refused(tmp_path):
    folder = fuse("qwen3_moe", tmp_path)
    with Weights(folder) as weights:
        tensors = {each: weights[each][:] for each in weights.names()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file(tensors | {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2))}, folder / "model.safetensors")
    with (
        pytest.raises(ConvertError, match=rf"{name} is \[8, 32, 24\], and config.json makes it \[8, 24, 32\]"),
        open_model(folder, model_of("qwen3_moe")),
    ):
        pass
