"""Models whose tokens attend to those that an indexer chooses (DeepSeek-V3.2, GLM-5) come with full attention."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.convert.families import FAMILIES, family_that_holds
from moe_jax.convert.hf_config import HfConfig
from moe_jax.convert.source import left_out, model_in, open_model
from moe_jax.convert.write import write_model
from tests.convert.golden import GOLDEN, changed, expected, logits_in, model_of, of_transformers, read
from tests.convert.test_mtp import params_in

NAMES = ["deepseek_v32", "deepseek_v32_2", "glm_moe_dsa"]
INDEXER = ".self_attn.indexer."


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_if_the_indexer_chooses_all(name: str) -> None:
    tokens, logit_BNV = expected(name)
    assert tokens.shape[1] <= json.loads((GOLDEN / name / "config.json").read_text())["index_topk"]
    np.testing.assert_allclose(logits_in(GOLDEN / name), logit_BNV, rtol=0, atol=2e-5)


def test_the_first_tokens_have_the_logits_of_sparse_attention() -> None:
    """As many as an indexer chooses. Those of further tokens differ."""
    most = 8
    difference_BNv = np.abs(logits_in(GOLDEN / "deepseek_v32")[..., ::4] - of_transformers("deepseek_v32_sparse"))
    assert difference_BNv[:, :most].max() < 2e-5
    assert difference_BNv[:, most:].max(axis=-1).min() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_a_deepseek_v3_without_indexers(name: str, tmp_path: Path) -> None:
    """All other tensors come back bit for bit."""
    model, out = model_of(name), tmp_path / "out"
    family = family_that_holds(model)
    assert family.model_type == "deepseek_v3"
    write_model(out, model, family, read(GOLDEN / name), "float32", 64, GOLDEN / name)
    there, back = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, out))
    kept = {tensor: x for tensor, x in there.items() if INDEXER not in tensor}
    assert len(kept) < len(there)
    assert kept.keys() == back.keys()
    for tensor, x in kept.items():
        assert (x.dtype, x.shape, x.tobytes()) == (back[tensor].dtype, back[tensor].shape, back[tensor].tobytes())
    settings = json.loads((out / "config.json").read_text())
    assert (settings["model_type"], settings["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert FAMILIES["deepseek_v3"].model(HfConfig(settings, "")) == model
    assert left_out(out, model) is None


@pytest.mark.parametrize(
    ("name", "settings", "most", "tensors"),
    [
        ("deepseek_v32", {}, 64, 15),
        ("deepseek_v32", {"index_topk": None}, 2048, 15),
        ("glm_moe_dsa", {}, 64, 10),  # a block shares the choice of the one below
    ],
)
def test_the_note_says_how_long_attention_is_the_same(
    name: str, settings: dict[str, object], most: int, tensors: int, tmp_path: Path
) -> None:
    folder = changed(name, tmp_path, **settings)
    if settings:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    assert left_out(folder, model_of(name)) == (
        f"attention is full, not to index_topk={most} tokens that an indexer chooses: the same for the first {most} "
        f"tokens of a sequence; {tensors} tensors of indexers are not read, and exports are of deepseek_v3"
    )


def test_a_module_of_multi_token_prediction_is_read_without_its_indexer(tmp_path: Path) -> None:
    folder, decoder = changed("deepseek_v32", tmp_path), model_of("deepseek_v32")
    model = dataclasses.replace(decoder, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    d, above, highest = decoder.hidden_size, "model.layers.3.", "model.layers.2."
    module = {name.replace(highest, above): x for name, x in tensors.items() if name.startswith(highest)}
    module |= {f"{above}{name}.weight": np.ones(d, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
    module[f"{above}eh_proj.weight"] = np.ones((d, 2 * d), np.float32)
    save_file(tensors | module, folder / "model.safetensors")
    params = params_in(folder, model)
    np.testing.assert_array_equal(params["mtp_norm"], 1)
    assert "; 20 tensors of indexers are not read" in (left_out(folder, model) or "")
    assert "num_nextn_predict_layers=1 reads it" in (left_out(folder, decoder) or "")


def test_published_files_leave_settings_to_the_family(tmp_path: Path) -> None:
    """DeepSeek's own files have no list of blocks, and scales of FP8 for indexers, too."""
    config = json.loads((GOLDEN / "deepseek_v32/config.json").read_text())
    gone = ("mlp_layer_types", "layer_types", "index_topk", "head_dim", "qk_head_dim")
    settings = {k: v for k, v in config.items() if k not in gone}
    settings |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    folder = changed("deepseek_v32", tmp_path)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    scale = {f"model.layers.0{INDEXER}wk.weight_scale_inv": np.ones((1, 1), np.float32)}
    save_file(tensors | scale, folder / "model.safetensors")
    assert model_in(folder) == model_of("deepseek_v32")
    with open_model(folder, model_of("deepseek_v32")):
        pass
