"""The tensors of a Mamba-2 layer, and where the blocks of a model have one.

One tensor has the gates, values, keys (B), queries (C) and steps of all heads and groups, one after the other; another
one the convolutions of values, keys and queries.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.convert.tensors import AxisPart, Tensor

NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # of the steps of time, as JSON has it
_OF_GROUPS = "group_heads.head"


class BlockParts(NamedTuple):
    """What a block has."""

    attention: bool  # instead of Mamba-2
    mlp: bool = True  # or experts


def block_pattern(blocks: Sequence[BlockParts]) -> dict[str, Any]:
    """Return the arguments of MambaConfig for the places of blocks, with the shortest `attn_layer_period`.

    Blocks may end within a period.
    """
    if not any(block.attention or not block.mlp for block in blocks):
        return {"attn_layer_period": None, "attn_layer_offsets": (), "mixer_only_offsets": ()}
    period = next(n for n in range(1, len(blocks) + 1) if blocks[n:] == blocks[: len(blocks) - n])
    return {
        "attn_layer_period": period,
        "attn_layer_offsets": tuple(place for place in range(period) if blocks[place].attention),
        "mixer_only_offsets": tuple(place for place in range(period) if not blocks[place].mlp),
    }


def mamba_rows(model: ModelConfig, name: str) -> list[Tensor]:
    """Return the rows of a Mamba-2 layer of this name on disk, without its norm."""
    mamba = model.mamba
    values, keys, heads = mamba.value_width, mamba.group_width, mamba.num_heads or 0
    projected = {"gate": values, "value": values, "key": keys, "query": keys, "step": heads}
    convolved = {"value": values, "key": keys, "query": keys}
    axes = {"gate": "heads.head", "value": "heads.head", "step": "heads"}
    rows = [
        Tensor(f"{name}.in_proj.weight", f"attention.{own}", f"{axes.get(own, _OF_GROUPS)} model", within=part)
        for own, part in _parts(projected).items()
    ]
    for own, part in _parts(convolved).items():
        axis = axes.get(own, _OF_GROUPS)
        rows.append(Tensor(f"{name}.conv1d.weight", f"attention.conv_{own}", f"{axis} 1 taps", within=part))
        rows.append(Tensor(f"{name}.conv1d.bias", f"attention.conv_{own}_bias", axis, within=part))
    return [
        *rows,
        Tensor(f"{name}.A_log", "attention.decay_log", "heads"),
        Tensor(f"{name}.dt_bias", "attention.step_bias", "heads"),
        Tensor(f"{name}.D", "attention.skip", "heads"),
        Tensor(f"{name}.norm.weight", "attention.value_norm", "heads.head"),
        Tensor(f"{name}.out_proj.weight", "attention.out", "model heads.head"),
    ]


def _parts(sizes: dict[str, int]) -> dict[str, AxisPart]:
    """Return the parts of a tensor that has arrays of these sizes one after the other."""
    total, first, found = sum(sizes.values()), 0, {}
    for own, size in sizes.items():
        found[own] = AxisPart(first, total)
        first += size
    return found
