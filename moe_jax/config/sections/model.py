"""The sections of the model: `model` with `moe`, `attention`, `latent` and `rope_scaling`."""

import functools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moe_jax.config.facts import GateFacts
from moe_jax.config.ranges import ANY, BLOCKS, EXPERTS, LARGE, PARTS, WIDTH, Range, number
from moe_jax.config.registry import DISPATCHER_FACTS, GATE_FACTS, NO_HOOKS
from moe_jax.config.sections.hashing import HashedOnce
from moe_jax.config.sections.recurrent import DeltaNetConfig, MambaConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The Mixture-of-Experts layer of a block."""

    num_experts: int = number(8, Range(0, EXPERTS))  # 0: no block has experts (a dense model)
    top_k: int = number(2, Range(1, EXPERTS))  # experts per token
    intermediate_size: int = number(512, Range(1, WIDTH))  # hidden width of one expert
    # experts that process every token, computed as one MLP of their joint width
    num_shared_experts: int = number(0, Range(0, PARTS))
    shared_gate: bool = False  # multiply the shared experts' output by a sigmoid of the token's features (Qwen2-MoE)
    dense_residual: bool = False  # add the MLP of a dense block to the experts' output (Arctic)
    # with top_k=1, multiply the input of a token's expert by its weight, instead of the output (Llama 4)
    apply_probs_on_input: bool = False
    bias: bool = False  # bias vectors of the router's logits and after each matrix of an expert
    # slots per expert / even share of the tokens; null: dropless
    capacity_factor: float | None = number(1.25, Range(0, EXPERTS, above=True))
    # changes of the factor, as pairs of a step (counted from 1) and the factor from then on: [[1000, 1.5], [5000, 1.0]]
    capacity_schedule: tuple[tuple[float, ...], ...] = number((), Range(0, ANY, above=True))
    gate: str = "softmax"  # one of docs/gates.md, or package.module:function, see docs/extend.md
    norm_topk_prob: bool = True  # the k weights of a token sum to 1 (if k > 1)
    # normalize also with top_k=1: the weight is 1, as in Mixtral, and the loss gives the router no gradient. Otherwise
    # the weight is the expert's score, as in Switch
    norm_top1_prob: bool = False
    routed_scaling_factor: float = number(1.0, Range(0, LARGE, above=True))  # factor on the routed experts' output
    # gates deepseek_v2 and deepseek_v3: the number of groups of consecutive experts,
    n_group: int = number(1, Range(1, EXPERTS))
    topk_group: int = number(1, Range(1, EXPERTS))  # and the number of groups that a token's experts come from
    # gate xmoe: the width of the space into which tokens and experts are projected; null: half the number of experts
    router_rank: int | None = number(None, Range(1, 2**17))
    slots_per_expert: int = number(1, Range(1, 2**20))  # gate softmoe: on each source device, instead of a capacity
    # assignment of tokens to slots: sort, einsum (GShard's one-hot product), or package.module:name of a
    # TokenDispatcher
    dispatcher: str = "sort"
    # hooks around the layer and its exchanges: none; bf16 or fp8, which send rows as bfloat16 (no change if they are
    # computed in it) or as 8-bit floats; or package.module:name of Hooks
    hooks: str = "none"
    # operands of the routed experts' matrix products: in train.compute_dtype, or rounded to 8-bit floats, see
    # docs/models.md
    expert_matmuls: Literal["compute_dtype", "fp8"] = "compute_dtype"
    first_k_dense_replace: int = number(0, Range(0, BLOCKS))  # number of lowest blocks, all with a dense MLP
    moe_layer_freq: int = number(1, Range(1, BLOCKS))  # above those, every n-th block has experts
    aux_loss_coeff: float = number(0.01, Range(0, LARGE))  # weight of the load-balance loss
    # loads in the load-balance loss: of each block over the whole batch (with train.grad_accumulation over one part),
    # of all blocks pooled, or of each block over each sequence separately, see docs/balance.md
    load_balancing_type: Literal["batch", "pooled", "sequence"] = "batch"
    # gate sparsemixer: experts whose logit is below the best one by more than twice this share of the larger absolute
    # value of both are not drawn, and count in no weight
    router_jitter_noise: float = number(0.01, Range(0, 1, above=True))
    # gates softmax, sigmoid and deepseek_v3: how far a step moves each expert's score bias against its load, see
    # docs/balance.md; null: there is no bias, or it is not updated
    bias_update_rate: float | None = number(None, Range(0, LARGE))
    z_loss_coeff: float = number(0.001, Range(0, LARGE))  # weight of the router z-loss

    @property
    def gate_facts(self) -> GateFacts:
        """The declared properties of the gate."""
        return GATE_FACTS.of(self.gate)

    @property
    def has_hooks(self) -> bool:
        """Whether hooks are called around the layer and its exchanges."""
        return self.hooks != NO_HOOKS

    @property
    def divides_by_sum(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        return self.norm_topk_prob and (self.top_k > 1 or self.norm_top1_prob)

    @property
    def latent_router_width(self) -> int:
        """The width of the space into which the gate xmoe projects tokens and experts."""
        return self.router_rank or max(self.num_experts // 2, 1)

    @property
    def sorts_rows(self) -> bool:
        """Whether tokens choose experts and are sorted into rows by expert."""
        return DISPATCHER_FACTS.of(self.dispatcher).sorts_rows and not self.gate_facts.fills_slots

    @property
    def sends_capacity_rows(self) -> bool:
        """Whether experts have a capacity, and sorted rows fill their slots."""
        return self.capacity_factor is not None and self.sorts_rows

    @property
    def sends_sized_rows(self) -> bool:
        """Whether experts have no capacity, and sorted rows are sent with their sizes."""
        return self.capacity_factor is None and self.sorts_rows


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1).

    All keys and values of a token are projected from one short vector, the latent.
    """

    # width of the latent; null: no latents, grouped-query attention
    kv_lora_rank: int | None = number(None, Range(1, 2**17))
    # width of the queries' latent; null: queries are projected from the token's features
    q_lora_rank: int | None = number(None, Range(1, 2**17))
    qk_nope_head_dim: int = number(128, Range(1, 2**16))  # features of a query or key that are not rotated
    # features that are rotated; all heads share this part of the key
    qk_rope_head_dim: int = number(64, Range(2, 2**16))
    v_head_dim: int = number(128, Range(1, 2**16))  # features of a value
    # epsilon of the latents' norms; null: model.rms_norm_eps
    rms_norm_eps: float | None = number(None, Range(0, 1, above=True))


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The mask, biases, sinks and output gate of attention."""

    bias: bool = False  # bias vectors after the projections
    out_bias: bool = True  # with bias=true, also after the output projection (not in Qwen2-MoE)
    sinks: bool = False  # a learned logit of each head that has no value (gpt-oss)
    output_gate: bool = False  # multiply each head's output by a sigmoid of the token's features (Qwen3-Next)
    # tokens that a token attends to, itself included; null: all before it
    sliding_window: int | None = number(None, Range(1, ANY))
    # tokens of a chunk: a token attends to those before it in its own chunk, counted from the beginning of the
    # sequence; null: to all before it (Llama 4)
    chunk_size: int | None = number(None, Range(1, ANY))
    full_every: int | None = number(None, Range(1, ANY))  # every n-th block has no window and no chunks
    nope_every: int | None = number(None, Range(1, ANY))  # every n-th block has no rotary embedding (Llama 4)
    # in blocks without rotary embedding, queries at position p are multiplied by
    # 1 + attn_scale · ln(1 + ⌊(p + 1) / floor_scale⌋), p counted from 0 (Llama 4); 0: they are not
    attn_scale: float = number(0.0, Range(0, LARGE))
    floor_scale: int = number(8192, Range(1, ANY))  # tokens


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Scaling of rotary frequencies for sequences longer than those of pre-training, see docs/models.md.

    A frequency is measured in turns: rotations of a pair of features in `original_max_position_embeddings` tokens.
    Frequencies of up to `slow_turns` are divided by `factor`, those of `fast_turns` or more are not, and between them
    there is a ramp.
    """

    # linear: all frequencies are divided; longrope: each by a number of its own
    rope_type: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = number(1.0, Range(1, LARGE))
    original_max_position_embeddings: int = number(4096, Range(1, ANY))  # tokens
    slow_turns: float = number(1.0, Range(0, LARGE, above=True))
    fast_turns: float = number(32.0, Range(0, LARGE, above=True))
    truncate: bool = True  # yarn: the ramp is between whole numbers of pairs
    # longrope: what the frequency of each pair of features is divided by in sequences of up to
    # `original_max_position_embeddings` tokens, for generation prompt and answer together,
    short_factor: tuple[float, ...] = number((), Range(0, LARGE, above=True))
    long_factor: tuple[float, ...] = number((), Range(0, LARGE, above=True))  # and in longer ones
    attention_factor: float = number(1.0, Range(0, LARGE, above=True))  # factor on rotated queries and keys
    # m of DeepSeek: attention's logits are multiplied by (0.1·m·ln(factor) + 1)²
    mscale_all_dim: float = number(0.0, Range(0, LARGE))


class AttentionView(NamedTuple):
    """The mask and position encoding of one block's attention, or the recurrent layer that it has instead; and whether
    the block has more than that.
    """

    window: int | None  # tokens that a token attends to, itself included; None: all before it
    rope: bool  # whether queries and keys are rotated
    chunk: int | None = None  # tokens of a chunk, to whose tokens attention is limited; None: there are none
    recurrent: Literal["delta_net", "mamba"] | None = None  # the layer that the block has instead, which has neither
    has_mlp: bool = True  # whether an MLP or experts follow

    @property
    def is_recurrent(self) -> bool:
        """Whether the block has a layer with states instead of attention."""
        return self.recurrent is not None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(HashedOnce):
    """The decoder: pre-norm blocks of attention and an MLP or MoE layer."""

    vocab_size: int = number(256, Range(2, 2**24))  # at least as many as the tokenizer has tokens
    hidden_size: int = number(256, Range(2, 2**17))  # features of a token between blocks
    num_layers: int = number(4, Range(1, BLOCKS))  # blocks
    # modules above the last block that predict the token after the next one (DeepSeek-V3): 0 or 1, see docs/models.md
    num_nextn_predict_layers: int = number(0, Range(0, 1))
    num_attention_heads: int = number(4, Range(1, 2**14))
    # null: as many as num_attention_heads; fewer: grouped-query attention
    num_key_value_heads: int | None = number(None, Range(1, 2**14))
    head_dim: int | None = number(None, Range(2, 2**16))  # null: hidden_size / num_attention_heads
    intermediate_size: int = number(1024, Range(1, WIDTH))  # hidden width of the MLP in dense blocks
    # activation of MLPs and experts; clipped_swiglu: values are clipped to 7, and 1 is added to the ungated ones
    # (gpt-oss); squared_relu: max(x, 0)² without a gate (Nemotron-H)
    activation: Literal["swiglu", "gelu", "clipped_swiglu", "squared_relu"] = "swiglu"
    qk_norm: bool = False  # RMSNorm on queries and keys
    qk_norm_over: Literal["head", "projection"] = "head"  # norm of each head, or of all heads together (OLMoE)
    qk_norm_after_rope: bool = False  # this RMSNorm after the rotation instead of before it (Hunyuan-A13B)
    # in blocks with rotary embedding, each head's rotated query and key are divided by the root of their mean square,
    # without weights (Llama 4)
    qk_l2_norm: bool = False
    tie_word_embeddings: bool = False  # one matrix for the embedding and the head
    head_bias: bool = False  # a bias vector of the head's logits (Phi-3.5-MoE)
    rope_theta: float = number(10_000.0, Range(1, 1e15))  # base of the rotary embedding
    # share of a head's features that are rotated, the first ones (GLM-4.5, MiniMax-M2)
    partial_rotary_factor: float = number(1.0, Range(0, 1, above=True))
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    rms_norm_eps: float = number(1e-6, Range(0, 1, above=True))  # epsilon of the norms
    # the norms before attention, MLPs and experts, and the last one: RMSNorm, or LayerNorm with a bias (Phi-3.5-MoE)
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # weights of RMSNorms are differences from 1, but for those inside recurrent layers (Qwen3-Next)
    rms_norm_zero_centered: bool = False
    # factors of Granite: on the rows of the embedding,
    embedding_multiplier: float = number(1.0, Range(0, LARGE, above=True))
    # on what attention, MLPs and experts add to the residual stream,
    residual_multiplier: float = number(1.0, Range(0, LARGE, above=True))
    # and on the products of queries and keys; null: 1 / √(features of a head)
    attention_multiplier: float | None = number(None, Range(0, LARGE, above=True))
    logits_scaling: float = number(1.0, Range(0, LARGE, above=True))  # the head's logits are divided by this
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
    delta_net: DeltaNetConfig = field(default_factory=DeltaNetConfig)
    mamba: MambaConfig = field(default_factory=MambaConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    __hash__ = HashedOnce.__hash__

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_gated(self) -> bool:
        """Whether MLPs and experts have two input matrices: gate and up."""
        return self.activation in ("swiglu", "clipped_swiglu")

    @property
    def has_latents(self) -> bool:
        return self.latent.kv_lora_rank is not None

    @property
    def has_delta_nets(self) -> bool:
        """Whether blocks have a gated delta net instead of attention, all or some of them."""
        return self.delta_net.num_value_heads is not None

    @property
    def has_mamba(self) -> bool:
        """Whether blocks have Mamba-2 instead of attention, all or some of them."""
        return self.mamba.num_heads is not None

    @property
    def recurrent_period(self) -> int:
        """The blocks after which the kinds of recurrent layers and attention repeat."""
        if self.has_delta_nets:
            return self.delta_net.full_attention_interval or 1
        return (self.has_mamba and self.mamba.attn_layer_period) or 1

    @property
    def qk_width(self) -> int:
        """The features of a head's query or key."""
        latent = self.latent
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim if self.has_latents else self.head_width

    @property
    def rotary_width(self) -> int:
        """The features of a head's query or key that are rotated; with latents, those of `latent`."""
        return self.latent.qk_rope_head_dim if self.has_latents else int(self.head_width * self.partial_rotary_factor)

    @property
    def v_width(self) -> int:
        """The features of a head's value."""
        return self.latent.v_head_dim if self.has_latents else self.head_width

    @property
    def has_mtp(self) -> bool:
        """Whether a module predicts the token after the next one."""
        return self.num_nextn_predict_layers > 0

    @property
    def num_blocks(self) -> int:
        """The blocks of a training step: those of the decoder, and that of multi-token prediction."""
        return self.num_layers + self.num_nextn_predict_layers

    @property
    def views(self) -> tuple[AttentionView, ...]:
        """The attention view of each of the `num_blocks`, from the bottom up; the last one of the decoder is also that
        of multi-token prediction.
        """
        attention = self.attention

        def is_nth(block: int, every: int | None) -> bool:
            return every is not None and (block + 1) % every == 0

        def view(block: int) -> AttentionView:
            if self.has_delta_nets and not is_nth(block, self.delta_net.full_attention_interval):
                return AttentionView(window=None, rope=False, recurrent="delta_net")
            place = block % self.recurrent_period
            has_mlp = not self.has_mamba or place not in self.mamba.mixer_only_offsets
            if self.has_mamba and place not in self.mamba.attn_layer_offsets:
                return AttentionView(window=None, rope=False, recurrent="mamba", has_mlp=has_mlp)
            is_full = is_nth(block, attention.full_every)
            return AttentionView(
                window=None if is_full else attention.sliding_window,
                rope=not is_nth(block, attention.nope_every),
                chunk=None if is_full else attention.chunk_size,
                has_mlp=has_mlp,
            )

        views = tuple(view(block) for block in range(self.num_layers))
        return views + views[-1:] * self.num_nextn_predict_layers

    @functools.cached_property
    def block_kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """Whether each of the `num_blocks` has experts, or is dense: with an MLP, or neither (`AttentionView.has_mlp`).

        They are from the bottom up; multi-token prediction has a block of the same kind as the decoder's last one.
        """
        moe, views = self.moe, self.views
        first = moe.first_k_dense_replace

        def has_experts(block: int) -> bool:
            is_place = block >= first and (block - first + 1) % moe.moe_layer_freq == 0
            return moe.num_experts > 0 and is_place and views[block].has_mlp

        kinds: tuple[Literal["dense", "moe"], ...] = tuple(
            "moe" if has_experts(block) else "dense" for block in range(self.num_layers)
        )
        return kinds + kinds[-1:] * self.num_nextn_predict_layers

    @functools.cached_property
    def num_mlp_blocks(self) -> int:
        """How many of the `num_blocks` have an MLP instead of experts."""
        return sum(kind == "dense" and view.has_mlp for kind, view in zip(self.block_kinds, self.views, strict=True))
