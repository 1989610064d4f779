"""Quantised weights of Hugging Face models, which are dequantised to float32 when they are read.

A quantised tensor is stored as two: codes, which are numbers of 8 or 4 bits, and the scales of blocks of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from moe_jax.convert.hf_config import ConvertError, HfConfig
from moe_jax.convert.stored import StoredTensor
from moe_jax.convert.tensors import slice_of

FLOATS = ("F32", "BF16", "F16")  # the types that convert to float32 without rounding
_AT_A_TIME = 2**16  # numbers dequantised at a time
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3: NDArray[np.float32] = _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)  # the value of each code
_E8M0: NDArray[np.float32] = _BYTES.view(jnp.float8_e8m0fnu).astype(np.float32)  # 2^(code - 127); 255 is NaN
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_PAIRS = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=-1)  # [256, 2]: a byte's two values
_GROUP = 32  # numbers that share a scale in MXFP4


class TensorSpec(NamedTuple):
    """What a tensor on disk has to be: its shape, and safetensors' names of the types that its numbers may have."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS


class Quantization(Protocol):
    """A `quant_method` of config.json."""

    def parts(self, name: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
        """Return the names of a tensor's codes and scales; None if it is not quantised."""

    def specs(self, name: str, shape: tuple[int, ...]) -> tuple[TensorSpec, TensorSpec]:
        """Return the specs of a tensor's codes and scales. Raises ConvertError if its shape cannot be quantised."""

    def dequantize(self, codes: StoredTensor, scales: StoredTensor, index: Sequence[range]) -> NDArray[np.float32]:
        """Return the part of a tensor at `index`, a range of each of its axes.

        Memory holds the result and a small part of the codes.
        """


@dataclass(frozen=True)
class BlockFp8:
    """`fp8` of DeepSeek-V3: matrices of float8_e4m3fn, and a scale for each block of rows and columns.

    A value is its code times the scale, as in `weight_dequant` of DeepSeek-V3's `inference/kernel.py`, in float32. The
    last blocks of rows and columns may be smaller. A tensor of more axes is a stack of matrices.
    """

    block: tuple[int, int]  # rows, columns

    def parts(self, name: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
        found = tensors.get(name)
        if found is None or found.type != "F8_E4M3" or len(found.shape) < 2:
            return None
        return name, f"{name}_scale_inv"

    def specs(self, name: str, shape: tuple[int, ...]) -> tuple[TensorSpec, TensorSpec]:
        blocks = (-(-size // block) for size, block in zip(shape[-2:], self.block, strict=True))
        return TensorSpec(shape, ("F8_E4M3",)), TensorSpec((*shape[:-2], *blocks), (*FLOATS, "F8_E8M0"))

    def dequantize(self, codes: StoredTensor, scales: StoredTensor, index: Sequence[range]) -> NDArray[np.float32]:
        *stacked, rows, columns = index
        above = tuple(slice_of(each) for each in stacked)
        height, width = self.block
        across = slice(columns.start // width, -(-columns.stop // width))
        block_of_column = np.arange(columns.start, columns.stop) // width - across.start
        out = np.empty([len(each) for each in index], np.float32)
        for part in _row_chunks(rows, len(columns), height):
            own = out[..., part.start - rows.start : part.stop - rows.start, :]
            np.take(_E4M3, codes.slices[(*above, slice_of(part), slice_of(columns))], out=own, mode="clip")
            row = part.start // height
            scale = scales.slices[(*above, slice(row, row + 1), across)]
            scale = _E8M0[scale] if scales.type == "F8_E8M0" else scale.astype(np.float32)
            own *= scale[..., block_of_column]
        return out


@dataclass(frozen=True)
class Mxfp4:
    """`mxfp4` of gpt-oss: a stack of transposed matrices, whose rows are groups of 32 numbers of 4 bits (e2m1).

    `_blocks` [experts, columns, groups, 16] has two numbers per byte, the lower half first, and `_scales` [experts,
    columns, groups] the exponents of 2, plus 127, as in `convert_moe_packed_tensors` of transformers'
    `integrations/mxfp4.py`. The formats are those of OCP Microscaling Formats 1.0 (2023).
    """

    def parts(self, name: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
        names = f"{name}_blocks", f"{name}_scales"
        return names if any(each in tensors for each in names) else None

    def specs(self, name: str, shape: tuple[int, ...]) -> tuple[TensorSpec, TensorSpec]:
        if len(shape) != 3 or shape[1] % _GROUP:
            raise ConvertError(
                f"{name} is {list(shape)}: quant_method='mxfp4' needs three axes, the second a multiple of {_GROUP}; "
                "use the files that belong together"
            )
        experts, rows, columns = shape
        groups = (experts, columns, rows // _GROUP)
        return TensorSpec((*groups, _GROUP // 2), ("U8",)), TensorSpec(groups, ("U8",))

    def dequantize(self, codes: StoredTensor, scales: StoredTensor, index: Sequence[range]) -> NDArray[np.float32]:
        experts, rows, columns = index
        groups = range(rows.start // _GROUP, -(-rows.stop // _GROUP))
        out = np.empty((len(experts), len(columns), len(groups), _GROUP), np.float32)
        for own, expert in zip(out, experts, strict=True):
            for part in _row_chunks(columns, len(groups) * _GROUP, columns.stop):
                where = slice(expert, expert + 1), slice_of(part), slice_of(groups)
                piece = own[part.start - columns.start : part.stop - columns.start]
                pairs = piece.reshape(*piece.shape[:-1], _GROUP // 2, 2)
                np.take(_E2M1_PAIRS, codes.slices[where][0], axis=0, out=pairs, mode="clip")
                piece *= _E8M0[scales.slices[where][0]][..., None]
        values = out.reshape(len(experts), len(columns), -1).swapaxes(1, 2)
        return values[:, rows.start - groups.start * _GROUP : rows.stop - groups.start * _GROUP]


@dataclass(frozen=True)
class Dequantized:
    """A quantised tensor, which is read from disk and dequantised when it is sliced."""

    quantization: Quantization
    codes: StoredTensor
    scales: StoredTensor

    def __getitem__(self, index: tuple[slice, ...], /) -> NDArray[Any]:
        return self.quantization.dequantize(self.codes, self.scales, [range(each.start, each.stop) for each in index])


def quantization_of(hf: HfConfig) -> Quantization | None:
    """Return how the weights of a config.json are quantised, or None. Raises ConvertError if it is not supported."""
    found = hf.section("quantization_config")
    if found is None:
        return None
    method = found.word("quant_method")
    if method == "fp8":
        found.only("fmt", "e4m3", "float8_e4m3fn")  # MiniMax-M2 has the longer name
        found.only("activation_scheme", "dynamic")
        block = found.listed("weight_block_size")
        if len(block) != 2 or any(type(size) is not int or not 0 < size < 2**31 for size in block):
            raise ConvertError(
                f"{found.where}: weight_block_size={str(block)[:80]} is not supported: it must be rows and columns of "
                "a block, as [128, 128]"
            )
        return BlockFp8((block[0], block[1]))
    if method == "mxfp4" and hf.word("model_type") == "gpt_oss":
        return Mxfp4()
    raise ConvertError(
        f"{found.where}: quant_method={method!r} is not supported: it must be 'fp8' in blocks, or 'mxfp4' of gpt_oss; "
        "convert the model to bfloat16 first"
    )


def _row_chunks(rows: range, width: int, height: int) -> Iterator[range]:
    """Yield consecutive parts of `rows`, each within one block of `height` rows, and of few numbers."""
    most, start = max(_AT_A_TIME // width, 1), rows.start
    while start < rows.stop:
        stop = min(rows.stop, start + most, (start // height + 1) * height)
        yield range(start, stop)
        start = stop
