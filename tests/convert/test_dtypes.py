"""Numbers of 16 bits: read as they are, and written as they were."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.convert.families import family_that_holds
from moe_jax.convert.hf_config import ConvertError
from moe_jax.convert.write import write_model
from tests.convert.golden import GOLDEN, changed, logits_in, model_of, read

NAME = "qwen3_moe"
LARGEST, SMALLEST = 65504.0, 2.0**-24  # of float16; the smallest is not normal


@pytest.fixture
def half(tmp_path):
    """The golden model in float16, and the same numbers in float32."""
    tensors = {name: x.astype(np.float16) for name, x in load_file(GOLDEN / NAME / "model.safetensors").items()}
    tensors["model.layers.1.mlp.experts.3.gate_proj.weight"][2, :2] = LARGEST, SMALLEST
    folders = []
    for dtype in (np.float16, np.float32):
        folders.append(changed(NAME, tmp_path / dtype.__name__))
        save_file({name: x.astype(dtype) for name, x in tensors.items()}, folders[-1] / "model.safetensors")
    return folders


def test_float16_is_read_and_written_without_a_change(half, tmp_path):
    folder, wide = half
    expert = np.asarray(read(folder)["segments"][1][0]["moe"]["experts"]["gate"])[0, 3]
    assert (expert.dtype, expert.max(), np.abs(expert[expert != 0]).min()) == (np.float32, LARGEST, SMALLEST)
    np.testing.assert_array_equal(logits_in(folder), logits_in(wide), err_msg="computed in float32 both times")
    model = model_of(NAME)
    write_model(tmp_path / "out", model, family_that_holds(model), read(folder), "float16", 64, folder)
    there, back = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert there.keys() == back.keys()
    for name, x in there.items():
        assert (x.dtype, x.tobytes()) == (back[name].dtype, back[name].tobytes()), name


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path):
    """Nothing is left of the folder."""
    folder = changed(NAME, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][5] = -7e4
    save_file(tensors, folder / "model.safetensors")
    model = model_of(NAME)
    with pytest.raises(ConvertError) as refusal:
        write_model(tmp_path / "out", model, family_that_holds(model), read(folder), "float16", 64, folder)
    assert str(refusal.value) == (
        "--dtype=float16: model.norm.weight has numbers beyond its 65504: use --dtype float32"
    )
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
