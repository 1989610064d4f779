"""A language model that is a part of a model that also sees images: the same parameters as alone, the rest counted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.config import Config, MoEConfig, TrainConfig
from moe_jax.convert.hf_config import ConvertError, read_config
from moe_jax.convert.source import family_to_export, left_out, model_in
from moe_jax.convert.write import special_tokens
from tests.convert.golden import GOLDEN, model_of, read

QWEN, LLAMA = "qwen3_5_moe_text", "llama4_text"
IMAGES = {
    QWEN: {"model.visual.pos_embed.weight": np.zeros((4, 3), np.float32), "mtp.fc.weight": np.zeros(3, np.float32)},
    LLAMA: {
        "vision_model.class_embedding": np.zeros(3, np.float32),
        "multi_modal_projector.linear_1.weight": np.zeros((4, 3), np.float32),
    },
}


def with_images(folder: Path, name: str = QWEN, **settings: Any) -> Path:
    """A golden model as the language part of another model, as published; None removes a setting."""
    folder.mkdir()
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if name == QWEN:
        renamed = {each.replace("model.", "model.language_model.", 1): x for each, x in tensors.items()}
    else:
        renamed = {f"language_model.{each}": x for each, x in tensors.items()}
    save_file(renamed | IMAGES[name], folder / "model.safetensors")
    text = json.loads((GOLDEN / name / "config.json").read_text())
    whole = {
        "model_type": name.removesuffix("_text"),
        "text_config": text,
        "vision_config": {"depth": 2},
        "eos_token_id": 7,
    }
    whole |= settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))
    return folder


@pytest.mark.parametrize("name", IMAGES)
def test_the_language_model_is_read_and_the_rest_is_counted(name: str, tmp_path: Path) -> None:
    folder = with_images(tmp_path / "hf", name)
    assert model_in(folder) == model_of(name)
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(GOLDEN / name))
    of_mtp = "its module of multi-token prediction is not read: modules of this kind are not built, and the decoder "
    messages = {
        QWEN: f"{of_mtp}does not need it; 1 tensors for images are not read: the model reads text only",
        LLAMA: "2 tensors for images are not read: the model reads text only",
    }
    assert left_out(folder, model_of(name)) == messages[name]
    assert left_out(GOLDEN / name, model_of(name)) is None


def test_settings_of_the_part_precede_those_of_the_whole(tmp_path: Path) -> None:
    text = json.loads((GOLDEN / QWEN / "config.json").read_text())
    both = with_images(tmp_path / "both")
    assert special_tokens(read_config(both))["eos_token_id"] == 1
    one = with_images(tmp_path / "one", text_config={k: v for k, v in text.items() if k != "eos_token_id"})
    assert special_tokens(read_config(one))["eos_token_id"] == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_config": None}, "model_type='qwen3_5_moe' has no text_config: use the file that came with the model"),
        (
            {"text_config": {"model_type": "llama"}},
            'text_config: model_type="llama" is not supported: it must be "qwen3_5_moe_text"',
        ),
        (
            {"tie_word_embeddings": True},
            "text_config: tie_word_embeddings=false is not supported: it must be true",
        ),
        ({"text_config": [1]}, "text_config=[1] must be an object"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = with_images(tmp_path / "hf", **settings)
    with pytest.raises(ConvertError) as refusal:
        model_in(folder)
    assert str(refusal.value) == f"{folder / 'config.json'}: {message}"


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    folder = with_images(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"has both model.language_model.norm.weight and model.norm.weight: use "):
        read(folder)


def test_a_run_is_exported_to_the_family_of_the_model_that_it_began_with(tmp_path: Path) -> None:
    """Unless another one is named, or its files cannot hold the model."""
    config = Config(model=model_of(QWEN), train=TrainConfig(init_from=str(with_images(tmp_path / "hf"))))
    assert family_to_export(config, tmp_path, None).model_type == QWEN
    assert family_to_export(config, tmp_path, "qwen3_next").model_type == "qwen3_next"
    alone = dataclasses.replace(config, train=TrainConfig())
    assert family_to_export(alone, tmp_path, None).model_type == "qwen3_next"
    upcycled = Config(
        model=dataclasses.replace(model_of("qwen3"), moe=MoEConfig(capacity_factor=None)),
        train=TrainConfig(init_from=str(GOLDEN / "qwen3"), upcycle=True),
    )
    assert family_to_export(upcycled, tmp_path, None).model_type == "qwen3_moe"
