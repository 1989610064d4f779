"""What a model needs: parameters and floating-point operations, from its config alone."""

from dataclasses import dataclass

from moe_jax.config import Model


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameter counts of a model."""

    total: int
    active: int  # that one token meets: its top_k experts instead of all
    matrix_active: int  # of those, the ones in matrix products (no embedding lookup, no norms)
    expert: int  # in routed experts, the part that the expert axis cuts
    heads_and_hidden: int  # in attention and other MLPs: with experts, what the tensor axis cuts


def count_parameters(model: Model) -> Parameters:
    """Count every parameter of a model."""
    moe, d = model.moe, model.d_model
    heads = 2 * model.num_heads + 2 * model.kv_heads  # query and output, key and value
    attention = d * heads * model.head_width
    norms = 2 * d + (2 * model.head_width if model.qk_norm else 0)
    matrices = 3 if model.activation == "swiglu" else 2
    num_moe = model.block_kinds.count("moe")
    one_expert = matrices * d * moe.hidden_dim
    dense = matrices * d * model.hidden_dim * (model.num_layers - num_moe)
    mlps = num_moe * moe.num_shared_experts * one_expert + dense
    head = d * model.vocab_size
    router = num_moe * d * moe.num_experts
    matrix_active = model.num_layers * attention + mlps + router + num_moe * moe.top_k * one_expert + head
    not_in_products = model.num_layers * norms + d + (0 if model.tie_embeddings else head)
    inactive = num_moe * (moe.num_experts - moe.top_k) * one_expert
    return Parameters(
        total=matrix_active + not_in_products + inactive,
        active=matrix_active + not_in_products,
        matrix_active=matrix_active,
        expert=num_moe * moe.num_experts * one_expert,
        heads_and_hidden=model.num_layers * attention + mlps,
    )


def train_flops_per_token(model: Model, seq_len: int) -> float:
    """Floating-point operations of one token's forward and backward pass, nothing recomputed or padded.

    6 per matrix parameter it meets, and causal attention over seq_len/2 earlier tokens on average:
    forward 4·H·K·seq_len/2 per block, backward twice that.
    """
    attention = 6 * model.num_layers * model.num_heads * model.head_width * seq_len
    return float(6 * count_parameters(model).matrix_active + attention)


def state_bytes_per_device(model: Model, expert_ranks: int, tensor_ranks: int) -> int:
    """Float32 parameters and two AdamW moments on one device, experts cut over `expert_ranks`."""
    counts = count_parameters(model)
    whole = counts.total - counts.expert - counts.heads_and_hidden
    return 12 * (whole + counts.heads_and_hidden // tensor_ranks + counts.expert // (expert_ranks * tensor_ranks))
