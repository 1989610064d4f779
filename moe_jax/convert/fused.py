"""Fused experts: the format of transformers 5 in memory, in which two tensors of a block contain all experts.

`save_pretrained(save_original_format=False)` and some tools write this format. Export writes the original names.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection

from moe_jax.config import ModelConfig
from moe_jax.convert.family import Family
from moe_jax.convert.tensors import Tensor, TensorRange

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_GRANITE = {  # which stores all experts in two tensors anyway
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}
_EITHER = (f".{_GATE_UP}", ".block_sparse_moe.experts.gate_up_proj")
_ENDS = "model.embeddings.weight"  # of Nemotron-H, whose names begin with `backbone` otherwise
_PER_EXPERT = "{expert}"
_OLDER = {"block_sparse_moe.": "mlp.", "mlp.moe_statics.": "mlp.gate.moe_statics."}  # Mixtral's and ERNIE's names


def stored_family(family: Family, names: Collection[str]) -> Family:
    """Return the family with the table that fits files with these tensors: the fused one if experts are fused."""
    if not any(name.endswith(_EITHER) or name == _ENDS for name in names):
        return family
    return dataclasses.replace(
        family,
        root="model",
        block=functools.partial(_rows, family.block),
        recurrent_block=family.recurrent_block and functools.partial(_rows, family.recurrent_block),
    )


def _rows(block: Callable[[ModelConfig, str], list[Tensor]], model: ModelConfig, kind: str) -> list[Tensor]:
    """Return the rows of a block with fused experts; other rows do not change."""
    return [
        _fused_row(row, model.moe.intermediate_size)
        if _PER_EXPERT in row.name
        else dataclasses.replace(row, name=_newer(row.name))
        for row in block(model, kind)
    ]


def _newer(name: str) -> str:
    if name in _GRANITE:
        return _GRANITE[name]
    for older, newer in _OLDER.items():
        name = name.replace(older, newer)
    return name


def _fused_row(row: Tensor, hidden: int) -> Tensor:
    """Return the row of all experts' gate, up or down matrices; gate and up share a tensor, with gate first."""
    if row.name.startswith("mixer."):  # without gates
        name = row.name.replace(f".{_PER_EXPERT}", "").removesuffix(".weight")
        return Tensor(name, row.path, f"experts {row.axes}")
    name, part = _DOWN, None
    if not row.path.endswith(".down"):
        first = hidden * row.path.endswith(".up")
        name, part = _GATE_UP, TensorRange("hidden", 2 * hidden, (range(first, first + hidden),))
    return Tensor(name, row.path, f"experts {row.axes}", part)
