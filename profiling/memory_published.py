"""Memory per device by the formulas of papers, for comparison with the bytes that a compiler allocates.

Both formulas count mixed-precision Adam with a copy of the weights, 16 bytes per parameter, and a head without logits.
"""

from collections.abc import Mapping

from moe_jax.config import Config
from moe_jax.plan.resources import count_parameters

_PARAMETER_BYTES = 16  # 2 weight, 2 gradient, 4 master copy, 8 moments


def piper_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Return the bytes of one stage by Piper, equation 2.

    Per block, these are 64·M² + 48·E/EP·M·H + b·s·(12·M + 4·heads·s + 2·k·(3·H + M)). M is the hidden size, H the width
    of an expert, E the number of experts, EP that of expert ranks, s the sequence length and k the experts per token. b
    is the number of sequences on a device: its experts compute as many rows of other devices as other devices compute
    of its own.
    """
    model, moe, length = config.model, config.model.moe, config.data.seq_len
    tokens = config.train.batch_size * length / (mesh["data"] * mesh["expert"])
    width = model.hidden_size
    attention = 64 * width**2 + tokens * (12 * width + 4 * model.num_attention_heads * length)
    num_moe = model.block_kinds.count("moe")
    experts = 48 * moe.num_experts / mesh["expert"] * width * moe.intermediate_size
    experts += 2 * tokens * moe.top_k * (3 * moe.intermediate_size + width)
    dense = 48 * width * model.intermediate_size + 2 * tokens * (3 * model.intermediate_size + width)
    return model.num_layers * attention + num_moe * experts + (model.num_layers - num_moe) * dense


def monta_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Return the bytes by MoNTA, section III.

    These are 16 per parameter, sharded over tensor and expert ranks, and b·s·h·l·(13 + 21k + 5·a·s/h). b is the number
    of sequences, s their length, h the hidden size, l the number of layers, k the experts per token and a the number of
    heads. Tensor ranks share the activations as well.
    """
    model, counts, length = config.model, count_parameters(config.model), config.data.seq_len
    tokens = config.train.batch_size * length / (mesh["data"] * mesh["expert"])
    weights = _PARAMETER_BYTES * (counts.total - counts.expert + counts.expert / mesh["expert"]) / mesh["tensor"]
    of_token = (13 + 21 * model.moe.top_k) * model.hidden_size + 5 * model.num_attention_heads * length
    return weights + tokens * model.num_layers * of_token / mesh["tensor"]
