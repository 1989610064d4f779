"""Parameters and floating-point operations of a model, from its config alone."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.config import AttentionView, ModelConfig, Sections
from moe_jax.config.facts import SCORE_BIAS
from moe_jax.config.gates import gate_parameters
from moe_jax.plan.recurrent import mean_over_blocks, recurrent_layer


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameter counts of a model, multi-token prediction included."""

    total: int
    active: int  # parameters that one token passes through: its top_k experts instead of all
    matrix_active: int  # those of them in matrix products (no embedding lookup, no norms, no biases)
    expert: int  # in routed experts, sharded over the expert axis
    expert_whole: int  # those of them in vectors that every tensor rank has
    heads_and_hidden: int  # in attention and other MLPs, sharded over the tensor axis (as experts are)


class _Count(NamedTuple):
    """Parameters of a part of a block: matrices and vectors that the tensor axis shards, and those it does not."""

    sharded_matrices: int
    sharded_vectors: int = 0
    whole_matrices: int = 0
    whole_vectors: int = 0

    @property
    def sharded(self) -> int:
        return self.sharded_matrices + self.sharded_vectors

    @property
    def matrices(self) -> int:
        return self.sharded_matrices + self.whole_matrices

    @property
    def total(self) -> int:
        return self.sharded + self.whole_matrices + self.whole_vectors


@functools.lru_cache(maxsize=256)
def count_parameters(model: ModelConfig) -> Parameters:
    """Count every parameter of a model."""
    moe, d, blocks = model.moe, model.hidden_size, model.num_blocks
    num_moe = model.block_kinds.count("moe")
    attentions = [_attention(model, view.is_recurrent) for view in model.views]
    attention, expert = _Count(*map(sum, zip(*attentions, strict=True))), _mlp(model, moe.intermediate_size, moe.bias)
    num_dense = model.num_mlp_blocks + (num_moe if moe.dense_residual else 0)
    dense, shared = _mlp(model, model.intermediate_size), _mlp(model, moe.intermediate_size * moe.num_shared_experts)
    mlps = num_moe * shared.total + num_dense * dense.total
    head, gate = d * model.vocab_size, _gate(model)
    chosen = num_moe * moe.top_k
    matrix_active = attention.matrices + mlps + num_moe * gate.matrices + chosen * expert.matrices + head
    matrix_active += _mtp_input(model).matrices
    norms = blocks + num_moe + model.num_mlp_blocks + 1 + model.num_nextn_predict_layers
    vectors = (
        _norm(model) * norms
        + _head_bias(model)
        + _mtp_input(model).whole_vectors
        + attention.total
        - attention.matrices
    )
    vectors += chosen * (expert.total - expert.matrices) + num_moe * (gate.total - gate.matrices)
    active = matrix_active + vectors + (0 if model.tie_word_embeddings else head)
    return Parameters(
        total=active + (num_moe * moe.num_experts - chosen) * expert.total,
        active=active,
        matrix_active=matrix_active,
        expert=num_moe * moe.num_experts * expert.total,
        expert_whole=num_moe * moe.num_experts * expert.whole_vectors,
        heads_and_hidden=attention.sharded + mlps,
    )


class Owned(NamedTuple):
    """Parameters of one owner of gradients: those that every device has, and those sharded over mesh axes."""

    whole: int = 0
    heads_and_hidden: int = 0  # sharded over tensor ranks
    expert: int = 0  # sharded over expert and tensor ranks
    expert_whole: int = 0  # sharded over expert ranks
    biases: int = 0  # those in `whole` that gradients do not update, so that they have no moments
    whole_matrices: int = 0  # those in `whole` that are matrices of a block, but a gate's
    sharded_vectors: int = 0  # those in `heads_and_hidden` that are vectors
    expert_vectors: int = 0  # those in `expert` that are vectors
    end_matrices: int = 0  # those in `whole` of the embedding and the head

    @property
    def hidden_matrices(self) -> "Owned":
        """The matrices of blocks, but a gate's."""
        sharded, expert = self.heads_and_hidden - self.sharded_vectors, self.expert - self.expert_vectors
        return Owned(self.whole_matrices, sharded, expert)


class Owners(tuple[Owned, ...]):
    """The parameters of several owners. As they are keys of caches, their hash is computed once."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @functools.cached_property
    def blocks(self) -> tuple[tuple[Owned, int], ...]:
        """The different ones between the first and the last, each with its number: most blocks are alike."""
        return tuple(Counter(self[1:-1]).items())


@functools.lru_cache(maxsize=256)
def owned_parameters(model: ModelConfig) -> Owners:
    """Parameters of the embedding, each block, and the head with the last norms. A tied head is the embedding's."""
    table = model.hidden_size * model.vocab_size
    own_head = 0 if model.tie_word_embeddings else table
    vectors = _norm(model) * (1 + model.num_nextn_predict_layers) + _head_bias(model)
    head = Owned(vectors + own_head, end_matrices=own_head)
    blocks = [owned_by_block(model, kind, view) for kind, view in zip(model.block_kinds, model.views, strict=True)]
    blocks[model.num_layers :] = [with_mtp_input(each, model) for each in blocks[model.num_layers :]]
    return Owners((Owned(table, end_matrices=table), *blocks, head))


def with_mtp_input(block: Owned, model: ModelConfig) -> Owned:
    """Return the parameters of a block of multi-token prediction, from those of a block of its kind."""
    more = _mtp_input(model)
    return block._replace(whole=block.whole + more.total, whole_matrices=block.whole_matrices + more.whole_matrices)


def owned_by_block(model: ModelConfig, kind: str, view: AttentionView) -> Owned:
    """Parameters of a block of a kind, `dense` or `moe`, with a view of attention."""
    return owned_by_kind(model, view.is_recurrent, view.has_mlp)[kind]


@functools.lru_cache(maxsize=256)
def owned_by_kind(model: ModelConfig, is_recurrent: bool = False, has_mlp: bool = True) -> dict[str, Owned]:
    """Parameters of a block, by its kind, `dense` or `moe`; with attention or a recurrent layer, and if it is dense
    with or without an MLP.
    """
    moe = model.moe
    attention, expert = _attention(model, is_recurrent), _mlp(model, moe.intermediate_size, moe.bias)
    dense, shared = _mlp(model, model.intermediate_size), _mlp(model, moe.intermediate_size * moe.num_shared_experts)
    experts = moe.num_experts
    always, sharded = 2 * _norm(model) + attention.whole_matrices + attention.whole_vectors, attention.sharded
    common = {"whole_matrices": attention.whole_matrices, "sharded_vectors": attention.sharded_vectors}
    return {
        "dense": Owned(always - (0 if has_mlp else _norm(model)), sharded + (dense.total if has_mlp else 0), **common),
        "moe": Owned(
            always + _gate(model).total,
            sharded + shared.total + (dense.total if moe.dense_residual else 0),
            experts * expert.sharded + experts * expert.whole_matrices,
            experts * expert.whole_vectors,
            experts if SCORE_BIAS.name in gate_parameters(model) else 0,
            **common,
            expert_vectors=experts * expert.sharded_vectors,
        ),
    }


def mean_mlp_width(model: ModelConfig) -> float:
    """The hidden width of the MLP of blocks without experts, on average: blocks without an MLP count with 0."""
    dense = model.block_kinds.count("dense")
    return (
        model.intermediate_size
        if dense == model.num_mlp_blocks
        else (model.intermediate_size * model.num_mlp_blocks / dense)
    )


def attention_matrices(model: ModelConfig) -> float:
    """Parameters in the projections of one block's attention, on average over the blocks."""
    return mean_over_blocks(model, _attention(model).matrices, _attention(model, is_recurrent=True).matrices)


def _attention(model: ModelConfig, is_recurrent: bool = False) -> _Count:
    """Parameters of one block's attention, or of its recurrent layer."""
    if is_recurrent:
        layer = recurrent_layer(model)
        return _Count(layer.head_matrices, layer.head_vectors, layer.whole_matrices, layer.whole_vectors)
    d, heads, latent = model.hidden_size, model.num_attention_heads, model.latent
    sinks = heads if model.attention.sinks else 0
    if latent.kv_lora_rank is not None:
        rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
        of_heads = rank * (latent.qk_nope_head_dim + model.v_width) + d * model.v_width
        of_heads += (d if q_rank is None else q_rank) * model.qk_width
        whole = d * (rank + latent.qk_rope_head_dim + (q_rank or 0))
        return _Count(heads * of_heads, sinks, whole, rank + (q_rank or 0))
    queries, keys = heads * model.head_width, model.kv_heads * model.head_width
    sharded, whole = sinks, 0
    if model.attention.bias:
        sharded, whole = sharded + queries + 2 * keys, d if model.attention.out_bias else 0
    if model.qk_norm and model.qk_norm_over == "projection":
        sharded += queries + keys
    elif model.qk_norm:
        whole += 2 * model.head_width
    gates = queries if model.attention.output_gate else 0
    return _Count(d * (2 * queries + 2 * keys + gates), sharded, whole_vectors=whole)


def _norm(model: ModelConfig) -> int:
    """Parameters of a norm of features."""
    return model.hidden_size * (2 if model.normalization == "layernorm" else 1)


def _head_bias(model: ModelConfig) -> int:
    return model.vocab_size if model.head_bias else 0


def gate_matrices(model: ModelConfig) -> int:
    """Parameters in matrix products of one block's gate, and of the gate of its shared experts."""
    return _gate(model).matrices


def mixed_matrices(model: ModelConfig) -> int:
    """Products with activations per token, for a gate that mixes tokens into slots and slots into tokens."""
    moe = model.moe
    return 2 * model.hidden_size * moe.num_experts * moe.slots_per_expert if moe.gate_facts.mixes else 0


def _gate(model: ModelConfig) -> _Count:
    """Parameters of one block's gate."""
    sizes = [tuple(dims.values()) for dims, _ in gate_parameters(model).values()]
    of_shared = model.hidden_size if model.moe.shared_gate else 0
    return _Count(
        0,
        whole_matrices=of_shared + sum(math.prod(size) for size in sizes if len(size) > 1),
        whole_vectors=sum(math.prod(size) for size in sizes if len(size) == 1),
    )


def _mtp_input(model: ModelConfig) -> _Count:
    """Parameters that make the input of multi-token prediction's block."""
    d = model.hidden_size * model.has_mtp
    return _Count(0, whole_matrices=2 * d * d, whole_vectors=2 * d)


def _mlp(model: ModelConfig, hidden: int, bias: bool = False) -> _Count:
    """Parameters of one MLP or expert."""
    inner = 2 if model.is_gated else 1
    return _Count((inner + 1) * model.hidden_size * hidden, *((inner * hidden, 0, model.hidden_size) if bias else ()))


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation and padding.

    There are 6 per matrix parameter that the token passes through. Causal attention covers the earlier tokens of its
    window, seq_len/2 on average without one: forward 2·H·(K+V) for each of them in a block, backward twice that. A
    delta net has 6·H·K·V forward for its H value heads, Mamba-2 4·H·K·V, and backward twice that. Multi-token
    prediction has a block of its own and uses the head once more.
    """
    again = model.hidden_size * model.vocab_size * model.num_nextn_predict_layers
    visible = sum(_mean_visible(view, seq_len) for view in model.views if not view.is_recurrent)
    attention = 6 * model.num_attention_heads * (model.qk_width + model.v_width) * visible
    states = 3 * recurrent_layer(model).needed_flops * sum(view.is_recurrent for view in model.views)
    mixes = 6 * mixed_matrices(model) * model.block_kinds.count("moe")
    return float(6 * (count_parameters(model).matrix_active + again) + attention + states + mixes)


def _mean_visible(view: AttentionView, seq_len: int) -> float:
    """The number of earlier tokens that a token attends to, averaged over a sequence."""
    if view.chunk is not None:
        chunks, rest = divmod(seq_len, view.chunk)
        return (chunks * view.chunk**2 + rest**2) / (2 * seq_len)
    width = seq_len if view.window is None else min(view.window, seq_len)
    return width - width**2 / (2 * seq_len)


def parameters_per_device(config: Sections, mesh: Mapping[str, int]) -> int:
    """Parameters of one device of a mesh of these sizes without pipeline stages, with its copies of experts."""
    counts = count_parameters(config.model)
    whole = counts.total - counts.expert - counts.heads_and_hidden
    experts = counts.expert_whole + (counts.expert - counts.expert_whole) // config.mesh.expert_tensor_ranks(mesh)
    of_expert = experts // max(config.model.moe.num_experts, 1)
    local = experts // config.mesh.expert_ranks(mesh) + config.replicas * of_expert
    return whole + counts.heads_and_hidden // mesh["tensor"] + local
