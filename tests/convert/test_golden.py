"""Models of each family: the logits of transformers, and the same tensors again when they are written."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moe_jax.config import Config, MeshConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.convert.families import FAMILIES, family_that_holds
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.write import write_model
from moe_jax.models.parameters import in_order
from tests.convert.golden import GOLDEN, NAMES, expected, model_of, read
from tests.models.test_decode import logits_of

SAME = {
    "glm4_moe_lite": "deepseek_v3",
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_moe_text_2"), "qwen3_next"),
}  # other names or files of the same architecture


# second ones of families whose blocks differ
SIZES = [
    *NAMES,
    *(
        f"{name}_2"
        for name in ("qwen3_next", "qwen3_5_moe_text", "phimoe", "llama4_text", "granitemoehybrid", "nemotron_h")
    ),
]


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_transformers(name):
    token_BN, logit_BNV = expected(name)
    np.testing.assert_allclose(logits_of(read(GOLDEN / name), token_BN, model_of(name)), logit_BNV, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SIZES)
def test_tensors_come_back_bit_for_bit(name, tmp_path):
    """And the settings, as far as they are read."""
    model, dtype = model_of(name), "bfloat16" if name == "mixtral" else "float32"
    model_type = name.removesuffix("_2")
    assert family_that_holds(model).model_type == SAME.get(name, model_type)
    family = family_that_holds(model, model_type)
    write_model(tmp_path / "out", model, family, read(GOLDEN / name), dtype, 64, GOLDEN / name, 60_000)
    there, back = (
        {tensor: x for file in folder.glob("model*.safetensors") for tensor, x in load_file(file).items()}
        for folder in (GOLDEN / name, tmp_path / "out")
    )
    assert there.keys() == back.keys()
    for tensor, x in there.items():
        assert (x.dtype, x.shape, x.tobytes()) == (back[tensor].dtype, back[tensor].shape, back[tensor].tobytes()), (
            tensor
        )
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["model_type"], settings["max_position_embeddings"]) == (model_type, 64)
    assert FAMILIES[model_type].model(HfConfig(settings, "")) == model


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoehybrid"])
def test_each_device_reads_its_part(name):
    whole, cut = read(GOLDEN / name), read(GOLDEN / name, MeshConfig(data=1, expert=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, cut, whole)
    assert any(leaf.addressable_shards[0].data.size * 4 == leaf.size for leaf in jax.tree.leaves(cut))


def test_stages_hold_their_blocks():
    """In rows of their own, those that are not used are 0."""
    mesh = MeshConfig(data=1, pipeline=2)
    config = Config(model=model_of("deepseek_v3"), mesh=mesh)
    back = in_order(jax.device_get(read(GOLDEN / "deepseek_v3", mesh)), Stages.of(config))
    jax.tree.map(np.testing.assert_array_equal, back, read(GOLDEN / "deepseek_v3"))
