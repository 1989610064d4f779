"""Tensors that several files of a folder have: which copy is read."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.convert.files import INDEX, Weights
from moe_jax.convert.hf_config import ConvertError

NAME, OTHER = "lm_head.weight", "model.norm.weight"
RIGHT, OLD = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((4, 3), np.float32)


def folder_of(folder: Path, weight_map: dict[str, str], **files: np.ndarray) -> Path:
    """A folder of files by their names without suffix, each with a copy of the tensor."""
    for file, copy in files.items():
        save_file({NAME: copy, f"{file}.bias": copy[0]}, folder / f"{file}.safetensors")
    named = {f"{file}.bias": f"{file}.safetensors" for file in files} | weight_map
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))
    return folder


def read(folder: Path) -> np.ndarray:
    with Weights(folder) as weights:
        weights.check({NAME: (4, 3)})
        return weights[NAME][:]


@pytest.mark.parametrize("files", [{"a": OLD, "b": RIGHT}, {"b": RIGHT, "c": OLD}, {"a": OLD, "b": RIGHT, "c": OLD}])
def test_the_index_decides_which_file_counts(files, tmp_path):
    """Wherever it stands among their names."""
    np.testing.assert_array_equal(read(folder_of(tmp_path, {NAME: "b.safetensors"}, **files)), RIGHT)


@pytest.mark.parametrize("weight_map", [{}, {NAME: "z.safetensors"}])
def test_without_a_word_of_the_index_copies_must_agree(weight_map, tmp_path):
    """As where the file that it names does not have the tensor."""
    save_file({OTHER: OLD}, tmp_path / "z.safetensors")
    folder = folder_of(tmp_path, weight_map, a=RIGHT, b=RIGHT)
    np.testing.assert_array_equal(read(folder), RIGHT)
    changed = RIGHT.copy()
    changed[3, 2] += 1
    with pytest.raises(ConvertError) as refusal:
        read(folder_of(tmp_path, weight_map, a=RIGHT, b=changed))
    assert str(refusal.value) == (
        f"{tmp_path}: a.safetensors and b.safetensors have different numbers for {NAME}, and {INDEX} names no file "
        "that has it: name one there"
    )


def test_copies_are_compared_in_parts(tmp_path, monkeypatch):
    """The last row counts, too."""
    monkeypatch.setattr("moe_jax.convert.stored._COMPARED", 6)
    test_without_a_word_of_the_index_copies_must_agree({}, tmp_path)


def test_a_file_that_the_index_does_not_name_is_no_guess(tmp_path):
    """transformers would read that one alone."""
    folder = folder_of(tmp_path, {}, a=RIGHT)
    save_file({NAME: OLD}, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=f"has model.safetensors, which {INDEX} does not name: remove the one that"):
        read(folder)


def test_one_copy_is_read_from_wherever_it_is(tmp_path):
    folder = folder_of(tmp_path, {NAME: "b.safetensors", "b.bias": "b.safetensors"}, a=RIGHT)
    save_file({"b.bias": OLD[0]}, folder / "b.safetensors")
    np.testing.assert_array_equal(read(folder), RIGHT)
