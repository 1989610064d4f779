"""The module of multi-token prediction of a DeepSeek-V3: read, computed and written as it is stored."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.convert.families import family_that_holds
from moe_jax.convert.hf_config import ConvertError
from moe_jax.convert.read import read_params
from moe_jax.convert.source import left_out, open_model
from moe_jax.convert.write import write_model
from moe_jax.models.head import unembed
from moe_jax.models.transformer import forward
from moe_jax.parallel.mesh import make_mesh
from tests.convert.golden import GOLDEN, changed, expected, model_of, read, shapes_on
from tests.models.test_decode import COMPUTE, logits_of, on_one_device
from tests.references import norm
from tests.step.gradients import sharded_gradients

DECODER = model_of("deepseek_v3")
MODEL = dataclasses.replace(DECODER, num_nextn_predict_layers=1)
ABOVE = f"model.layers.{DECODER.num_layers}."
EPS = DECODER.rms_norm_eps
COPIES = {
    f"{ABOVE}embed_tokens.weight": "model.embed_tokens.weight",
    f"{ABOVE}shared_head.head.weight": "lm_head.weight",
}


def with_module(folder: Path, **changes: Any) -> Path:
    """The model of `tests/golden` with a module of random numbers above its blocks."""
    made = changed("deepseek_v3", folder)
    tensors, rng, d = load_file(made / "model.safetensors"), np.random.default_rng(0), DECODER.hidden_size
    highest = f"model.layers.{DECODER.num_layers - 1}."
    shapes = {name.replace(highest, ABOVE): x.shape for name, x in tensors.items() if name.startswith(highest)}
    shapes |= {f"{ABOVE}{name}.weight": (d,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{ABOVE}eh_proj.weight"] = (d, 2 * d)
    tensors |= {name: drawn(rng, shape) for name, shape in shapes.items()}
    tensors |= {copy: tensors[name] for copy, name in COPIES.items()}
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    save_file(tensors, made / "model.safetensors")
    return made


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    numbers = 0.3 * rng.standard_normal(shape, np.float32)
    return numbers + 1 if len(shape) == 1 and shape[0] != DECODER.moe.num_experts else numbers


def params_in(folder: Path, model: ModelConfig) -> Any:
    config, mesh = Config(model=model), make_mesh(MeshConfig(), jax.devices()[:1])
    with open_model(folder, model) as (weights, family):
        return read_params(weights, family, Stages.of(config), shapes_on(mesh, config))


def module_logits(folder: Path, token_N: np.ndarray) -> np.ndarray:
    """Logits of the module for one sequence, by a decoder of one block that embeds tokens as the module's inputs.

    Such decoders are compared with transformers elsewhere.
    """
    tensors = load_file(folder / "model.safetensors")
    features = np.asarray(
        on_one_device(lambda p, t: forward(p, t, DECODER, COMPUTE).x_BND)(
            params_in(folder, DECODER), token_N[None, :-1]
        )
    )[0]
    features = norm(norm(features, tensors["model.norm.weight"], EPS), tensors[f"{ABOVE}hnorm.weight"], EPS)
    embedding = norm(tensors["model.embed_tokens.weight"][token_N[1:]], tensors[f"{ABOVE}enorm.weight"], EPS)
    inputs = np.concatenate([embedding, features], axis=-1) @ tensors[f"{ABOVE}eh_proj.weight"].T
    table = np.zeros_like(tensors["model.embed_tokens.weight"])
    table[: len(inputs)] = inputs
    lowest = {name.replace(ABOVE, "model.layers.0."): x for name, x in tensors.items() if name.startswith(ABOVE)}
    ends = {"model.embed_tokens.weight": table, "lm_head.weight": tensors["lm_head.weight"]}
    ends["model.norm.weight"] = tensors[f"{ABOVE}shared_head.norm.weight"]
    own = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    block = {name: x for name, x in lowest.items() if name.split(".")[3] in own}
    made = changed(
        "deepseek_v3",
        folder / f"decoder_{token_N[0]}_{token_N[1]}_{token_N[-1]}",
        num_hidden_layers=1,
        first_k_dense_replace=0,
    )
    save_file(block | ends, made / "model.safetensors")
    one = dataclasses.replace(DECODER, num_layers=1, moe=dataclasses.replace(DECODER.moe, first_k_dense_replace=0))
    return np.asarray(logits_of(read(made), np.arange(len(inputs))[None], one))[0]


def test_logits_and_loss_are_those_of_a_block_on_the_modules_input(tmp_path: Path) -> None:
    folder, (token_BN, _) = with_module(tmp_path), expected("deepseek_v3")
    token_BN1 = np.asarray(token_BN)
    params = params_in(folder, MODEL)

    def own_logits(p: Any, token_BN: jax.Array, next_BN: jax.Array) -> Any:
        found = forward(p, token_BN, MODEL, COMPUTE, next_BN=next_BN)
        return unembed(p | {"norm": p["mtp_norm"]}, found.mtp_BND, MODEL), unembed(p, found.x_BND, MODEL)

    mesh_logits, decoded = on_one_device_of_two(own_logits)(params, token_BN1[:, :-1], token_BN1[:, 1:])
    expected_BNV = np.stack([module_logits(folder, token_N) for token_N in token_BN1])
    np.testing.assert_allclose(mesh_logits, expected_BNV, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(decoded, logits_of(params, token_BN1[:, :-1], MODEL))
    log_BNV = np.asarray(jax.nn.log_softmax(expected_BNV[:, :-1]))
    nats = -np.take_along_axis(log_BNV, token_BN1[:, 2:, None], axis=-1).mean()
    config = Config(
        model=MODEL,
        data=DataConfig(seq_len=token_BN1.shape[1] - 1),
        train=TrainConfig(batch_size=len(token_BN1), compute_dtype="float32"),
        mesh=MeshConfig(data=1),
    )
    found = sharded_gradients(config, params, token_BN1, step=0).parts.mtp_loss
    np.testing.assert_allclose(found, nats, rtol=1e-5)


def on_one_device_of_two(function: Any) -> Any:
    """Like `on_one_device`, for a function with one more argument."""
    run = on_one_device(lambda p, both: function(p, *both))
    return lambda p, one, other: run(p, (one, other))


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    folder = with_module(tmp_path)
    family = family_that_holds(MODEL)
    assert family.model_type == "deepseek_v3"
    write_model(tmp_path / "out", MODEL, family, params_in(folder, MODEL), "float32", 64, folder)
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert there.keys() == back.keys()
    for name, x in there.items():
        assert (x.dtype, x.shape, x.tobytes()) == (back[name].dtype, back[name].shape, back[name].tobytes()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_model_without_the_module_leaves_it_out(tmp_path: Path) -> None:
    folder = with_module(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params_in(folder, DECODER), read(GOLDEN / "deepseek_v3"))
    assert left_out(folder, DECODER)
    assert not left_out(folder, MODEL)
    assert not left_out(GOLDEN / "deepseek_v3", DECODER)
    write_model(
        tmp_path / "out", DECODER, family_that_holds(DECODER), params_in(folder, DECODER), "float32", 64, folder
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_module_that_is_not_built_is_left_out_with_a_word(tmp_path: Path) -> None:
    """As Qwen3-Next stores it. transformers leaves it out without a word."""
    folder = changed("qwen3_next", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": np.zeros((32, 64), np.float32)}, folder / "model.safetensors")
    model = model_of("qwen3_next")
    jax.tree.map(np.testing.assert_array_equal, params_in(folder, model), read(GOLDEN / "qwen3_next"))
    assert "is not read: modules of this kind are not built" in (left_out(folder, model) or "")
    assert left_out(GOLDEN / "qwen3_next", model) is None


def test_copies_may_be_missing_and_must_not_differ(tmp_path: Path) -> None:
    whole = with_module(tmp_path / "whole")
    without = with_module(tmp_path / "without", **dict.fromkeys(COPIES))
    jax.tree.map(np.testing.assert_array_equal, params_in(whole, MODEL), params_in(without, MODEL))
    name = f"{ABOVE}embed_tokens.weight"
    other = with_module(tmp_path / "other", **{name: np.zeros((DECODER.vocab_size, DECODER.hidden_size), np.float32)})
    message = "has other numbers than model.embed_tokens.weight, of which it must be a copy: use "
    with pytest.raises(ConvertError, match=f"{name} {message}model.num_nextn_predict_layers=0"):
        params_in(other, MODEL)


def test_a_head_that_is_not_tied_as_the_config_says_is_refused(tmp_path: Path) -> None:
    """transformers takes the head of the files, after a warning."""
    folder, model = changed("llama", tmp_path), model_of("llama")
    assert model.tie_word_embeddings
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, folder / "model.safetensors")
    params_in(folder, model)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"lm_head.weight has other numbers than .*: set tie_word_embeddings to fal"):
        params_in(folder, model)


def test_a_folder_without_the_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"num_nextn_predict_layers=1, and the model in .* has no module of multi-t"):
        params_in(GOLDEN / "deepseek_v3", MODEL)
    upper = dataclasses.replace(model_of("qwen3_moe"), num_nextn_predict_layers=1)
    with pytest.raises(ConvertError, match=r"which have no model.num_nextn_predict_layers=1"):
        family_that_holds(upper, "qwen3_moe")
