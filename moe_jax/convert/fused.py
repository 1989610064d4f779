"""Experts as transformers 5 holds them in memory: two tensors of a block have all of them.

`save_pretrained(save_original_format=False)` writes them so, and so do some tools. Export writes the original names.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection

from moe_jax.config import ModelConfig
from moe_jax.convert.family import Family
from moe_jax.convert.tensors import Tensor, TensorRange

_BOTH, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_OF_EACH = "{expert}"
_OLDER = "block_sparse_moe."  # Mixtral's name for `mlp.`


def as_stored(family: Family, names: Collection[str]) -> Family:
    """The family with the table of files that have tensors of these names."""
    if not any(name.endswith(f".{_BOTH}") for name in names):
        return family
    return dataclasses.replace(family, block=functools.partial(_rows, family.block))


def _rows(block: Callable[[ModelConfig, str], list[Tensor]], model: ModelConfig, kind: str) -> list[Tensor]:
    """Of a block; what is not of single experts stays as it is."""
    return [
        _of_all(row, model.moe.intermediate_size)
        if _OF_EACH in row.name
        else dataclasses.replace(row, name=row.name.replace(_OLDER, "mlp."))
        for row in block(model, kind)
    ]


def _of_all(row: Tensor, hidden: int) -> Tensor:
    """The row of all experts' gates, which stand in front of the matrices `up`, of these, or of `down`."""
    name, part = _DOWN, None
    if not row.path.endswith(".down"):
        first = hidden * row.path.endswith(".up")
        name, part = _BOTH, TensorRange("hidden", 2 * hidden, (range(first, first + hidden),))
    return Tensor(name, row.path, f"experts {row.axes}", part)
