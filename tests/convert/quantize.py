"""Slow encoders and decoders of quantised tensors, and golden models whose weights are quantised."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from moe_jax.convert.files import INDEX
from tests.convert.golden import GOLDEN, changed

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_MATRIX = re.compile(r"model\.layers.*(_proj|_proj_with_mqa)(\.weight)?")  # routers and norms stay


class Quantized(NamedTuple):
    stored: dict[str, np.ndarray]  # by the ends of their names
    values: np.ndarray


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    return (-1 if code >> 3 else 1) * E2M1[code & 7]


def fp8_values(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Values of a stack of matrices of codes in uint8, one number at a time."""
    out = np.empty(codes.shape, np.float32)
    for *above, row, column in np.ndindex(codes.shape):
        scale = np.float32(scales[(*above, row // block[0], column // block[1])])
        out[(*above, row, column)] = np.float32(e4m3(int(codes[(*above, row, column)]))) * scale
    return out


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[experts, groups of 32, columns], one number at a time."""
    experts, columns, groups, _ = blocks.shape
    out = np.empty((experts, 32 * groups, columns), np.float32)
    for expert, column, group, byte in np.ndindex(blocks.shape):
        both, power = int(blocks[expert, column, group, byte]), 2.0 ** (int(scales[expert, column, group]) - 127)
        out[expert, 32 * group + 2 * byte, column] = e2m1(both & 15) * power
        out[expert, 32 * group + 2 * byte + 1, column] = e2m1(both >> 4) * power
    return out


def fp8(x: np.ndarray, blocks: tuple[int, int]) -> Quantized:
    """A stack of matrices, with the largest of each block at the largest code."""
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((*x.shape[:-2], *(-(-size // block) for size, block in zip(x.shape[-2:], blocks, strict=True))))
    table = np.array([e4m3(code) for code in range(256)])
    for *above, row, column in np.ndindex(scales.shape):
        where = (*above, *(slice(i * block, (i + 1) * block) for i, block in zip((row, column), blocks, strict=True)))
        scales[(*above, row, column)] = scale = np.float32(np.abs(x[where]).max() / 448)
        codes[where] = np.nanargmin(np.abs(table - x[where][..., None] / scale), axis=-1)
    single = scales.astype(np.float32)
    return Quantized({"": codes.view(jnp.float8_e4m3fn), "_scale_inv": single}, fp8_values(codes, single, blocks))


def mxfp4(experts: int, rows: int, columns: int, seed: int) -> Quantized:
    """Random codes, with scales that make numbers of about 0.1."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
    scales = rng.integers(120, 125, blocks.shape[:-1], np.uint8)
    return Quantized({"_blocks": blocks, "_scales": scales}, mxfp4_values(blocks, scales))


def deepseek_v3(folder: Path, source: Path, block: tuple[int, int]) -> tuple[Path, Path]:
    """Quantise all matrices of blocks but the routers' in the golden model, or in a folder with the same tensors."""
    tensors = load_file(source / "model.safetensors")
    found = {name: fp8(x, block) for name, x in tensors.items() if _MATRIX.fullmatch(name)}
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, "dequantize": True}
    return pair("deepseek_v3", folder, {"quantization_config": settings}, tensors, found)


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """With 1 and 2 groups of rows in a matrix."""
    tensors, found, hidden, width = load_file(GOLDEN / "gpt_oss" / "model.safetensors"), {}, 64, 32
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        found[f"{experts}gate_up_proj"] = mxfp4(4, width, 2 * hidden, layer)
        found[f"{experts}down_proj"] = mxfp4(4, hidden, width, layer + 2)
        bias = np.linspace(-1, 1, 4 * 2 * hidden, dtype=np.float32)
        tensors[f"{experts}gate_up_proj_bias"] = bias.reshape(4, 2 * hidden)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": True}
    return pair("gpt_oss", folder, {"intermediate_size": hidden, "quantization_config": method}, tensors, found)


def pair(
    name: str, folder: Path, settings: dict[str, object], tensors: dict[str, np.ndarray], found: dict[str, Quantized]
) -> tuple[Path, Path]:
    """Two copies of a golden model, with these settings and tensors: one quantised, and one with the same values."""
    kept = {each: x for each, x in tensors.items() if each not in found}
    stored = {f"{each}{end}": x for each, both in found.items() for end, x in both.stored.items()}
    quantized, plain = changed(name, folder / "quantized", **settings), changed(name, folder / "plain", **settings)
    write(quantized, kept | stored)
    (plain / "model.safetensors").unlink()
    values = json.loads((plain / "config.json").read_text()) | {"quantization_config": None}
    (plain / "config.json").write_text(json.dumps(values))
    save_file(kept | {each: both.values for each, both in found.items()}, plain / "model.safetensors")
    return quantized, plain


def write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Replace a model's files by two, with codes and scales of each tensor in different ones."""
    for file in folder.glob("model*"):
        file.unlink()
    files = {name: f"model-{1 + name.endswith(('_scale_inv', '_scales'))}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: x for name, x in tensors.items() if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
