"""Quantised weights: the values of slow decoders bit for bit, and the logits of the dequantised model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.config import MeshConfig
from moe_jax.convert.files import Weights
from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.quantized import BlockFp8, Mxfp4, quantization_of
from moe_jax.convert.source import model_in, open_model
from tests.convert import quantize
from tests.convert.golden import GOLDEN, logits_in, read
from tests.convert.test_fused import fuse

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SPLIT = MeshConfig(data=1, expert=2, tensor=2)


def all_slices(sizes, rng, number):
    """Random slices of every axis."""
    yield tuple(slice(0, size) for size in sizes)
    for _ in range(number):
        yield tuple(slice(*sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in sizes)


def assert_same(weights, name, values):
    """Every bit, with zeros of either sign and NaN, of all of it and of parts."""
    for index in all_slices(values.shape, np.random.default_rng(0), 30):
        found = weights[name][index]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.int32), values[index].view(np.int32), err_msg=str(index))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e8m0fnu])
@pytest.mark.parametrize("at_a_time", [2**16, 100])
def test_fp8_is_code_times_scale_of_its_block(dtype, at_a_time, tmp_path, monkeypatch):
    """All codes but NaN; neither axis is a multiple of its block."""
    monkeypatch.setattr("moe_jax.convert.quantized._AT_A_TIME", at_a_time)
    rng = np.random.default_rng(1)
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    codes = rng.permutation(np.resize(codes, 2 * 37 * 31)).reshape(2, 37, 31)
    scales = rng.uniform(1e-4, 2, (2, 3, 2)).astype(dtype)
    tensors, metadata = {"w": codes.view(jnp.float8_e4m3fn), "w_scale_inv": scales}, {"dtype": "F8_E4M3"}  # no tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with Weights(tmp_path, BlockFp8((16, 24))) as weights:
        weights.check({"w": codes.shape})
        assert_same(weights, "w", quantize.fp8_values(codes, scales.astype(np.float32), (16, 24)))


@pytest.mark.parametrize("at_a_time", [2**16, 100])
def test_mxfp4_is_code_times_power_of_its_group(at_a_time, tmp_path, monkeypatch):
    """All bytes, and exponents from subnormal to the largest."""
    monkeypatch.setattr("moe_jax.convert.quantized._AT_A_TIME", at_a_time)
    blocks = np.resize(np.arange(256, dtype=np.uint8), (2, 7, 3, 16))
    scales = np.random.default_rng(2).permutation(np.linspace(0, 252, 2 * 7 * 3).astype(np.uint8)).reshape(2, 7, 3)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with Weights(tmp_path, Mxfp4()) as weights:
        weights.check({"w": (2, 96, 7)})
        assert_same(weights, "w", quantize.mxfp4_values(blocks, scales))
        for shape in [(2, 90, 7), (96, 7)]:
            with pytest.raises(ConvertError, match="'mxfp4' needs three axes, the second a multiple of 32"):
                weights.check({"w": shape})


@pytest.fixture(params=["deepseek_v3", "deepseek_v3 fused", "gpt_oss"])
def folders(request, tmp_path):
    """A quantised model, and the same one dequantised."""
    if request.param == "gpt_oss":
        return quantize.gpt_oss(tmp_path)
    fused = request.param.endswith("fused")
    source = fuse("deepseek_v3", tmp_path) if fused else GOLDEN / "deepseek_v3"
    return quantize.deepseek_v3(tmp_path, source, (16, 24))  # most matrices are no multiples of it


def test_a_quantised_model_is_the_dequantised_one(folders):
    """All parameters and logits, bit for bit, with scales in another file; and each device of four reads its part."""
    quantized, plain = folders
    with open_model(quantized, model_in(plain)):
        pass
    expected = read(plain)
    jax.tree.map(np.testing.assert_array_equal, read(quantized), expected)
    jax.tree.map(np.testing.assert_array_equal, read(quantized, SPLIT), expected)
    np.testing.assert_array_equal(logits_in(quantized), logits_in(plain))
    assert np.isfinite(logits_in(plain)).all()


def test_eight_bits_have_two_names():
    both = [
        {"model_type": "minimax_m2", "quantization_config": FP8 | {"fmt": fmt}} for fmt in ("e4m3", "float8_e4m3fn")
    ]
    assert [quantization_of(HfConfig(values, "c")) for values in both] == [BlockFp8((128, 128))] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq' is not supported: it must be 'fp8' in blocks, or"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4' is not supported: it must be 'fp8' in blocks, or 'mxfp4' of"),
        ({"bits": 4}, "has no quant_method"),
        (FP8 | {"fmt": "e5m2"}, 'fmt="e5m2" is not supported: it must be "e4m3" or'),
        (FP8 | {"activation_scheme": "static"}, 'activation_scheme="static" is not supported: it must be "dynamic"'),
        (FP8 | {"weight_block_size": None}, r"weight_block_size=\[\] is not supported: it must be rows and columns"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\] is not supported"),
        (FP8 | {"weight_block_size": [1, 2**31]}, r"weight_block_size=\[1, 2147483648\] is not supported"),
    ],
)
def test_other_quantisations_are_refused_by_name(settings, message):
    with pytest.raises(ConvertError, match=f"^c: quantization_config:? {message}"):
        quantization_of(HfConfig({"model_type": "deepseek_v3", "quantization_config": settings}, "c"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: found.pop("w_scale_inv"), "has no tensor w_scale_inv: fetch all of its files"),
        (
            lambda found: found.update(w_scale_inv=np.ones((2, 2), np.float32)),
            r"w_scale_inv is \[2, 2\], and .* \[3, 2",
        ),
        (
            lambda found: found.update(w_scale_inv=np.ones((3, 2), np.int16)),
            "w_scale_inv is of type I16, which is not supported: it must be F32 or BF16 or F16 or F8_E8M0",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(edit, message, tmp_path):
    found = {"w": np.zeros((37, 31), jnp.float8_e4m3fn), "w_scale_inv": np.ones((3, 2), np.float32)}
    edit(found)
    save_file(found, tmp_path / "model.safetensors")
    with Weights(tmp_path, BlockFp8((16, 24))) as weights, pytest.raises(ConvertError, match=message):
        weights.check({"w": (37, 31)})


def test_a_block_may_be_larger_than_its_matrix(tmp_path):
    """A scale is not repeated over the columns that its block could have: here 8 GB."""
    codes, scales = np.full((3, 5), 0x38, np.uint8), np.full((1, 1), 0.5, np.float32)
    save_file({"w": codes.view(jnp.float8_e4m3fn), "w_scale_inv": scales}, tmp_path / "model.safetensors")
    with Weights(tmp_path, BlockFp8((2**31 - 1, 2**31 - 1))) as weights:
        weights.check({"w": codes.shape})
        assert_same(weights, "w", np.full((3, 5), 0.5, np.float32))


def test_codes_need_the_settings(tmp_path):
    """Without quantization_config, codes are no weights."""
    save_file({"w": np.zeros((4, 4), jnp.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with (
        Weights(tmp_path) as weights,
        pytest.raises(ConvertError, match="w is of type F8_E4M3, which is not"),
    ):
        weights.check({"w": (4, 4)})
