"""All settings of an experiment, as frozen sections of plain values.

The comment on a field gives its meaning and its unit; fractions are between 0 and 1. `config/validate/` checks the
values, and `config/yaml_io.py` reads them from YAML and the command line.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from moe_jax.config.facts import ExchangeFacts, GateFacts, OptimizerFacts, PipelineFacts, PolicyFacts
from moe_jax.config.ranges import (
    ALONG_AXIS,
    ANY,
    BLOCKS,
    BUCKET,
    CLUSTER,
    EXPERTS,
    FINITE,
    LARGE,
    PARTS,
    SAMPLED,
    SEEDS,
    SEQUENCE,
    SIMULATED,
    WIDTH,
    Range,
    number,
)
from moe_jax.config.registry import (
    DISPATCHER_FACTS,
    EXCHANGE_FACTS,
    GATE_FACTS,
    NO_HOOKS,
    OPTIMIZER_FACTS,
    PIPELINE_FACTS,
    POLICY_FACTS,
    REDUCTION_FACTS,
)
from moe_jax.config.step_kinds import STEP_FACTS, StepFacts, StepKindName

if TYPE_CHECKING:  # type checkers cannot evaluate the registries
    PipelineName = str
    ReductionName = str
else:
    PipelineName = Literal[tuple(PIPELINE_FACTS)]
    ReductionName = Literal[tuple(REDUCTION_FACTS)]


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
    """The mask, biases and sinks of attention."""

    bias: bool = False  # bias vectors after the projections
    out_bias: bool = True  # with bias=true, also after the output projection (not in Qwen2-MoE)
    sinks: bool = False  # a learned logit of each head that has no value (gpt-oss)
    # tokens that a token attends to, itself included; null: all before it
    sliding_window: int | None = number(None, Range(1, ANY))
    full_every: int | None = number(None, Range(1, ANY))  # every n-th block has no window
    nope_every: int | None = number(None, Range(1, ANY))  # every n-th block has no rotary embedding (Llama 4)


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Scaling of rotary frequencies for sequences longer than those of pre-training, see docs/models.md.

    A frequency is measured in turns: rotations of a pair of features in `original_max_position_embeddings` tokens.
    Frequencies of up to `slow_turns` are divided by `factor`, those of `fast_turns` or more are not, and between them
    there is a ramp.
    """

    rope_type: Literal["none", "linear", "llama3", "yarn"] = "none"  # linear: all frequencies are divided
    factor: float = number(1.0, Range(1, LARGE))
    original_max_position_embeddings: int = number(4096, Range(1, ANY))  # tokens
    slow_turns: float = number(1.0, Range(0, LARGE, above=True))
    fast_turns: float = number(32.0, Range(0, LARGE, above=True))
    truncate: bool = True  # yarn: the ramp is between whole numbers of pairs
    attention_factor: float = number(1.0, Range(0, LARGE, above=True))  # factor on rotated queries and keys
    # m of DeepSeek: attention's logits are multiplied by (0.1·m·ln(factor) + 1)²
    mscale_all_dim: float = number(0.0, Range(0, LARGE))


class AttentionView(NamedTuple):
    """The mask and position encoding of one block's attention."""

    window: int | None  # tokens that a token attends to, itself included; None: all before it
    rope: bool  # whether queries and keys are rotated


class HashedOnce:
    """The hash of a frozen dataclass that is a key of many caches, computed once.

    Pickles leave it out, since hashes of strings differ between processes. A subclass assigns
    `__hash__ = HashedOnce.__hash__`, since a dataclass would otherwise define its own.
    """

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each) for each in self.__dataclass_fields__))  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(HashedOnce):
    """The decoder: pre-norm blocks of attention and an MLP or MoE layer."""

    vocab_size: int = number(256, Range(2, 2**24))
    hidden_size: int = number(256, Range(2, 2**17))
    num_layers: int = number(4, Range(1, BLOCKS))
    # modules above the last block that predict the token after the next one (DeepSeek-V3): 0 or 1, see docs/models.md
    num_nextn_predict_layers: int = number(0, Range(0, 1))
    num_attention_heads: int = number(4, Range(1, 2**14))
    # null: as many as num_attention_heads; fewer: grouped-query attention
    num_key_value_heads: int | None = number(None, Range(1, 2**14))
    head_dim: int | None = number(None, Range(2, 2**16))  # null: hidden_size / num_attention_heads
    intermediate_size: int = number(1024, Range(1, WIDTH))  # hidden width of the MLP in dense blocks
    # activation of MLPs and experts; clipped_swiglu: values are clipped to 7, and 1 is added to the ungated ones
    # (gpt-oss)
    activation: Literal["swiglu", "gelu", "clipped_swiglu"] = "swiglu"
    qk_norm: bool = False  # RMSNorm on queries and keys
    qk_norm_over: Literal["head", "projection"] = "head"  # norm of each head, or of all heads together (OLMoE)
    qk_norm_after_rope: bool = False  # this RMSNorm after the rotation instead of before it (Hunyuan-A13B)
    tie_word_embeddings: bool = False  # one matrix for the embedding and the head
    rope_theta: float = number(10_000.0, Range(1, 1e15))
    # share of a head's features that are rotated, the first ones (GLM-4.5, MiniMax-M2)
    partial_rotary_factor: float = number(1.0, Range(0, 1, above=True))
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    rms_norm_eps: float = number(1e-6, Range(0, 1, above=True))
    # factors of Granite: on the rows of the embedding,
    embedding_multiplier: float = number(1.0, Range(0, LARGE, above=True))
    # on what attention, MLPs and experts add to the residual stream,
    residual_multiplier: float = number(1.0, Range(0, LARGE, above=True))
    # and on the products of queries and keys; null: 1 / √(features of a head)
    attention_multiplier: float | None = number(None, Range(0, LARGE, above=True))
    logits_scaling: float = number(1.0, Range(0, LARGE, above=True))  # the head's logits are divided by this
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
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
        return self.activation != "gelu"

    @property
    def has_latents(self) -> bool:
        return self.latent.kv_lora_rank is not None

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

        views = tuple(
            AttentionView(
                window=None if is_nth(i, attention.full_every) else attention.sliding_window,
                rope=not is_nth(i, attention.nope_every),
            )
            for i in range(self.num_layers)
        )
        return views + views[-1:] * self.num_nextn_predict_layers

    @functools.cached_property
    def block_kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """Whether each of the `num_blocks` has a dense MLP or experts, from the bottom up; multi-token prediction has a
        block of the same kind as the decoder's last one.
        """
        moe = self.moe
        first = moe.first_k_dense_replace
        kinds: tuple[Literal["dense", "moe"], ...] = tuple(
            "moe" if moe.num_experts and i >= first and (i - first + 1) % moe.moe_layer_freq == 0 else "dense"
            for i in range(self.num_layers)
        )
        return kinds + kinds[-1:] * self.num_nextn_predict_layers


@dataclass(frozen=True, kw_only=True)
class MeshConfig(HashedOnce):
    """The number of devices along each named axis. One axis may be -1: it gets all devices that the others leave."""

    __hash__ = HashedOnce.__hash__

    data: int = number(-1, ALONG_AXIS)
    expert: int = number(1, ALONG_AXIS)
    pipeline: int = number(1, ALONG_AXIS)
    tensor: int = number(1, ALONG_AXIS)
    context: int = number(1, ALONG_AXIS)
    experts_over_context: bool = False  # shard experts over the context ranks, too, see docs/context.md
    # shard experts over the tensor ranks, too, so that each is whole on its rank, see docs/exchange.md
    experts_over_tensor: bool = False
    # simulate this many devices on the CPU; null: use the available devices
    cpu_devices: int | None = number(None, SIMULATED)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of devices along each axis, by name."""
        return {
            "data": self.data,
            "expert": self.expert,
            "pipeline": self.pipeline,
            "tensor": self.tensor,
            "context": self.context,
        }

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that shard experts, together."""
        outer = ("context",) if self.experts_over_context else ()
        return (*outer, "expert", *(("tensor",) if self.experts_over_tensor else ()))

    def expert_ranks(self, sizes: Mapping[str, int]) -> int:
        """Return the number of ranks that experts are sharded over, on a mesh of these sizes."""
        outer = sizes["context"] if self.experts_over_context else 1
        return outer * sizes["expert"] * (sizes["tensor"] if self.experts_over_tensor else 1)

    def expert_tensor_ranks(self, sizes: Mapping[str, int]) -> int:
        """Return the number of tensor ranks that share each expert, on a mesh of these sizes."""
        return 1 if self.experts_over_tensor else sizes["tensor"]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(HashedOnce):
    """The order of a step's tasks."""

    __hash__ = HashedOnce.__hash__

    policy: str = "vanilla"  # expert_pipeline, unified, or package.module:name of a Policy, see docs/extend.md
    # unified: parts of a device's sequences; expert_pipeline: parts of the slots
    microbatches: int = number(1, Range(1, PARTS))
    # microbatches of the backward pass; null: the same number; unified: a divisor of it
    backward_microbatches: int | None = number(None, Range(1, PARTS))
    # unified: parts of a microbatch's slots, which are exchanged and computed one by one
    expert_chunks: int = number(1, Range(1, PARTS))
    # when weight gradients are computed: in the backward pass, or (greedy) where compute would wait for an exchange
    weight_grad: Literal["inline", "greedy"] = "inline"
    grad_reduce: Literal["end", "block", "bucketed"] = "end"  # when gradients are summed over devices
    # largest bucket of a bucketed reduction, 10⁶ bytes; null: a whole matrix
    bucket_cap_mb: float | None = number(None, BUCKET)
    # with optimizer.zero=3, when a scheduled step gathers a block's parameters: while the block before computes, where
    # no exchange is ready, or (block) right before the block, with half of the memory
    param_gather: Literal["prefetch", "block"] = "prefetch"
    # rates for the estimated times of tasks: 10¹² flop/s of a device; null: typical of the platform
    device_tflops: float | None = number(None, Range(0, FINITE, above=True))
    link_gb_per_s: float | None = number(None, Range(0, FINITE, above=True))  # 10⁹ byte/s; null: typical
    network_gb_per_s: float | None = number(None, Range(0, FINITE, above=True))  # the same between nodes of GPUs
    task_times: str | None = None  # a file of measured seconds (plan/measured.py), used instead of estimates
    # periods of blocks unrolled in one iteration of the scan over blocks. On GPUs a plain step with all of them
    # unrolled takes less memory, and its kernels move fewer bytes: see docs/memory.md
    unroll: int = number(1, Range(1, BLOCKS))
    # what the backward pass recomputes, see docs/architecture.md; chunk, with pipeline stages: a model chunk's whole
    # forward pass, exchanges included
    remat: Literal["none", "dots", "full", "chunk"] = "none"
    # with mesh.pipeline above 1: the order in which stages process the parts of train.grad_accumulation, see
    # docs/pipelines.md; coscheduled works without stages, too: it overlaps one part's backward pass with the next
    # one's forward pass
    pipeline: PipelineName = "1f1b"
    virtual_stages: int = number(1, Range(1, PARTS))  # groups of blocks of each stage (model chunks)
    # the head costs as much as this many periods of blocks: the last stage gets that many fewer, but at least one
    head_blocks: int = number(0, Range(0, BLOCKS))

    @property
    def policy_facts(self) -> PolicyFacts:
        """The declared properties of the policy. An external policy is assumed to split the batch."""
        return POLICY_FACTS.of(self.policy)

    @property
    def pipeline_facts(self) -> PipelineFacts:
        """The declared properties of the order of pipeline stages."""
        return PIPELINE_FACTS.of(self.pipeline)

    @property
    def cuts_batch(self) -> bool:
        """Whether microbatches are parts of a device's sequences. Those of an external policy are assumed to be."""
        return self.policy_facts.cuts == "batch"


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig(HashedOnce):
    """The communication of tokens and gradients between devices."""

    __hash__ = HashedOnce.__hash__

    # all-to-all: flat, one collective; ring, collective-permutes; hier_1d, hier_2d and halo, hierarchical over nodes,
    # see docs/exchange.md; ragged, only rows that exist (microbatches); background, concurrently with the program
    # (CPU); package.module:name of an Exchange, see docs/extend.md; auto: on GPUs and TPUs the fastest, as timed on the
    # devices, else flat
    algorithm: str = "auto"
    # ranks of the expert axis that are joined by fast links; null: detected from the devices
    ranks_per_node: int | None = number(None, CLUSTER)
    # sharing of an exchange by tensor ranks, see docs/exchange.md: each sends all rows (replicated), only its own rows
    # (o1), its own rows in chunks whose gathers overlap with the next exchange (o2), or also their copies (o3)
    tensor_form: Literal["replicated", "o1", "o2", "o3"] = "o1"
    tensor_chunks: int = number(2, Range(1, PARTS))  # chunks of o2 and o3
    # attention over context ranks, see docs/context.md: keys and values go around a ring while attention is computed
    # with those already received, or all are gathered first
    context_form: Literal["ring", "all_gather"] = "ring"
    # sum of gradients over devices: scatter_gather, ring or background, see docs/exchange.md
    reduction: ReductionName = "all_reduce"
    # without a capacity: buffer size of a rank for the rows of each sequence / their even share; rows beyond it are
    # dropped, and the run reports them. null: the buffer holds all rows, so that none is ever dropped
    # at least 1: with less, even a balanced router's rows would be dropped
    rank_capacity_factor: float | None = number(3.0, Range(1, EXPERTS))

    @property
    def facts(self) -> ExchangeFacts:
        """The declared properties of the algorithm."""
        return EXCHANGE_FACTS.of(self.algorithm)

    @property
    def in_background(self) -> bool:
        """Whether tokens or gradients are sent concurrently with the program, in the host's threads."""
        return self.facts.in_background or REDUCTION_FACTS.of(self.reduction).in_background

    @property
    def is_elsewhere(self) -> bool:
        """Whether the algorithm is an external one."""
        return ":" in self.algorithm


TOKEN_AXES = ("data", "expert", "context", "tensor")  # along which ranks have tokens of their own
MOST_MARKED_SOURCES = 32  # bits of tokens that are free for it (data/token_marks.py)
TEXT_SUFFIXES = (".jsonl", ".parquet")  # of files whose text is encoded while a run trains


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source of a mixture of tokens, see docs/data.md."""

    path: str  # a folder of token files, a .txt (read as bytes), .jsonl or .parquet file, or a saved dataset
    weight: float  # of its sequences: their share is weight / sum of all weights; 0: it is only validated on
    # changes of the weight, as pairs of a step (counted from 1) and the weight from then on: [[1000, 0.5], [5000, 2]]
    weight_schedule: tuple[tuple[float, ...], ...] = ()
    name: str | None = None  # in metrics; null: the last part of the path, without the suffix of a file

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        if self.name:
            return self.name
        last = self.path.rstrip("/").rpartition("/")[2]
        return next((last.removesuffix(kind) for kind in (".txt", *TEXT_SUFFIXES) if last.endswith(kind)), last)

    def weight_at(self, step: int) -> float:
        """Return the weight in a step, counted from 1."""
        return next((weight for first, weight in reversed(self.weight_schedule) if first <= step), self.weight)


@dataclass(frozen=True, kw_only=True)
class DataConfig(HashedOnce):
    """The source of tokens."""

    __hash__ = HashedOnce.__hash__

    # a folder of token files, a .txt (read as bytes), .jsonl or .parquet file, or a dataset of Hugging Face that was
    # saved to disk; null, or its default, with `sources`
    path: str | None = "configs/text/shakespeare.txt"
    sources: tuple[DataSource, ...] = ()  # a weighted mixture of several, instead of `path`
    # bytes, or a folder with a tokenizer.json: with it all text but .txt files is encoded while the run trains
    tokenizer: str = "bytes"
    text_key: str = "text"  # the field of a .jsonl object, or the column of a .parquet file or dataset, with the text
    seq_len: int = number(256, Range(2, SEQUENCE))  # tokens per sequence
    # share of a file's text, at its end, for validation; a folder has its own validation file
    validation_fraction: float = number(0.1, Range(0, 1, above=True, below=True))
    prefetch: int = number(8, Range(0, PARTS))  # batches read ahead
    # pieces of a prepared file that may be damaged and are skipped, see docs/data.md
    damaged_chunks: int = number(0, Range(0, ANY))
    # whether tokens attend to their own document alone; the first token of a document is then not predicted. The
    # documents are those of a prepared folder
    mask_documents: bool = False

    @property
    def has_marks(self) -> bool:
        """Whether the tokens of batches have marks (data/token_marks.py)."""
        return self.mask_documents or self.marked_sources > 0

    @property
    def marked_sources(self) -> int:
        """The number of sources that steps compute losses of; 0 if there is one source, or more than there are marks
        for.
        """
        return len(self.sources) if 1 < len(self.sources) <= MOST_MARKED_SOURCES else 0

    @property
    def mixture(self) -> tuple[DataSource, ...]:
        """The sources; one if there is no mixture."""
        return self.sources or (DataSource(path=self.path or "", weight=1.0),)

    @property
    def weight_steps(self) -> tuple[int, ...]:
        """The first step, and each one from which a source has another weight, in order."""
        changes = (int(step) for source in self.mixture for step, _ in source.weight_schedule)
        return tuple(sorted({1, *changes}))

    @property
    def path_names(self) -> tuple[str, ...]:
        """The names of the settings with the paths of the sources, for messages."""
        return tuple(f"data.sources[{number}].path" for number in range(len(self.sources))) or ("data.path",)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """The learning rate and the decay of some parameters."""

    match: str  # a regular expression that is found in the parameter's path, such as segments.0.0.moe.router
    learning_rate_factor: float = 1.0  # of the learning rate; 0: these parameters stay as they are
    weight_decay: float | None = None  # of all these arrays, vectors too; null: optimizer.weight_decay, of matrices


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(HashedOnce):
    """The optimizer, with a learning-rate schedule, weight decay, and gradients clipped by their global norm."""

    __hash__ = HashedOnce.__hash__

    # muon, lion or adafactor, see docs/optimizers.md, or package.module:name of a function, see docs/extend.md
    name: str = "adamw"
    learning_rate: float = number(1e-3, Range(0, LARGE))  # at the end of the warm-up
    # after the warm-up: down in all steps as a cosine or a line, constant, or wsd: constant, then down as a line
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = number(100, Range(0, ANY))  # before the first step at learning_rate
    final_fraction: float = number(0.1, Range(0, 1))  # of learning_rate, in the last step of train.steps
    decay_fraction: float = number(0.2, Range(0, 1))  # of train.steps, at their end, in which wsd goes down
    restarts: int = number(0, Range(0, PARTS))  # of cosine: times that it begins again, after equal numbers of steps
    beta1: float = number(0.9, Range(0, 1, below=True))
    beta2: float = number(0.95, Range(0, 1, below=True))
    eps: float = number(1e-8, Range(0, LARGE, above=True))
    momentum: float = number(0.95, Range(0, 1, below=True))  # of muon's matrices
    # muon's iterations that orthogonalize a matrix, and the type of their products' operands; auto: float32 on CPUs,
    # else bfloat16
    newton_schulz_steps: int = number(5, Range(1, 100))
    newton_schulz_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    weight_decay: float = number(0.1, Range(0, LARGE))  # on matrices; vectors are not decayed
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: stored with stochastic rounding
    # of each parameter the first one that matches, see docs/optimizers.md
    groups: tuple[ParameterGroup, ...] = ()
    clip_norm: float | None = number(1.0, Range(0, FINITE, above=True))  # null: no clipping
    # of the moving average of parameters that validation uses, average = d · average + (1 - d) · parameters after each
    # step; null: there is none
    ema_decay: float | None = number(None, Range(0, 1, below=True))
    # what is sharded over the devices that have the same parameters (ZeRO): 0, nothing; 1, moments; 2, gradients, too:
    # with train.grad_accumulation the gradients of each part of a batch are summed over devices separately; 3,
    # parameters, too, which are gathered where they are used (FSDP)
    zero: Literal[0, 1, 2, 3] = 0
    # hybrid sharding: the mesh axes over which ZeRO shards, such as those inside a node, while ranks along the others
    # have the same shards. null: all axes; see docs/fully_sharded.md
    zero_axes: tuple[Literal["data", "expert", "context", "tensor"], ...] | None = None

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The mesh axes over which ZeRO may shard."""
        return TOKEN_AXES if self.zero_axes is None else self.zero_axes

    @property
    def facts(self) -> OptimizerFacts:
        """The declared properties of the optimizer."""
        return OPTIMIZER_FACTS.of(self.name)

    def products_dtype(self, platform: str) -> str:
        """Return the type of the operands of muon's iterations: bfloat16 where its products are faster, if `auto`."""
        if self.newton_schulz_dtype != "auto":
            return self.newton_schulz_dtype
        return "float32" if platform == "cpu" else "bfloat16"

    @property
    def moment_bytes(self) -> int:
        """The bytes of a number of a moment."""
        return 2 if self.moments_dtype == "bfloat16" else 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig(HashedOnce):
    """The length of training, batches, precision, validation, and the reaction to bad steps."""

    __hash__ = HashedOnce.__hash__

    steps: int = number(1000, Range(1, ANY))
    seed: int = number(0, SEEDS)
    batch_size: int = number(32, Range(1, 2**20))  # sequences in one optimizer step, over all devices
    # parts of a batch, processed one after another; each fills slots and is balanced separately
    grad_accumulation: int = number(1, Range(1, 2**16))
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters and router stay float32
    # attention kernel, see docs/models.md. cudnn and splash: flash attention in bfloat16, on NVIDIA's GPUs and on TPUs;
    # tiled: XLA's products, in tiles; xla: with the logits of all pairs of tokens in memory; auto: cudnn or splash
    # where it is supported, else tiled for more than 512 tokens, else xla
    attention_kernel: Literal["auto", "xla", "tiled", "cudnn", "splash"] = "auto"
    # grouped matrix product of experts without a capacity, see docs/measure.md: blocks, one tile of rows after another;
    # ragged, XLA's own; pallas, hopper and blackwell (GPU), megablox (TPU) and tokamax, kernels. Or three, of the
    # forward pass and the gradients of rows and weights: hopper+hopper+pallas. auto: on GPUs and TPUs the fastest of
    # each pass, as timed on these devices, else the default of the platform
    grouped_product: str = "auto"
    # most tokens of a device whose logits are in memory at a time, see docs/memory.md; null: the tokens of 2²⁷ logits
    # (512 MiB)
    loss_chunk: int | None = number(None, Range(1, ANY))
    # weight of the z-loss of the head's logits: the mean over tokens of their squared log-sum-exp, see docs/models.md.
    # The router's is model.moe.z_loss_coeff
    z_loss_multiplier: float = number(0.0, Range(0, LARGE))
    # with model.num_nextn_predict_layers: weight of the loss of multi-token prediction, see docs/models.md,
    mtp_loss_scaling_factor: float = number(0.1, Range(0, LARGE))
    # and its changes, as pairs of a step (counted from 1) and the weight from then on: [[10000, 0.1]]
    mtp_loss_schedule: tuple[tuple[float, ...], ...] = number((), Range(0, ANY))
    # with mesh.cpu_devices and jax below 0.11: XLA's older emitters, which compile a step in half the time. Losses of
    # different schedules or bucket sizes then agree except for their last bits, instead of bit for bit
    quick_compile: bool = False
    # initial parameters of a new run: the folder of a Hugging Face model, or of a run; null: random numbers. See
    # docs/convert.md
    init_from: str | None = None
    upcycle: bool = False  # init_from is a dense model, and its MLP initializes each expert
    eval_every: int = number(250, Range(0, ANY))  # steps; 0: only at the end
    eval_batches: int = number(8, Range(1, ANY))  # at most as many as the text has
    # a step with a loss or gradient that is not finite is bad: it changes nothing. After this many bad steps in a row
    # the run rolls back to its newest checkpoint, and the second time it stops; null: never. See docs/bad_numbers.md
    bad_in_a_row: int | None = number(3, Range(1, ANY))
    # report a loss spike: loss / median of the last 64 losses above this factor; null: never
    spike_factor: float | None = number(None, Range(1, FINITE))
    skip_spikes: bool = False  # skip the update of a step with a loss spike, which counts as bad
    # folder to write the experts of all tokens in, in each step; and a folder of which to take them (router replay),
    # see docs/gates.md
    record_routing: str | None = None
    replay_routing: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the training state, in log.dir, and its safety copies."""

    every: int = number(500, Range(0, ANY))  # steps; 0: only at the end
    keep: int = number(2, Range(1, ANY))  # newest checkpoints to keep; older ones are deleted
    resume: bool = True  # resume from the newest checkpoint in log.dir, if there is one
    # steps between two safety copies of the state in the memory of two nodes, see docs/recovery.md; 0: none
    safety_copies_every: int = number(0, Range(0, ANY))
    safety_copies_dir: str = "/dev/shm"  # folder of safety copies on each node, in memory


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Tuning of settings during training, by timed steps, see docs/tune.md."""

    # schedule.bucket_cap_mb, schedule.microbatches, exchange.algorithm; none: no setting is tuned
    over: tuple[Literal["bucket_cap_mb", "microbatches", "algorithm"], ...] = ()
    samples: int = number(8, Range(2, PARTS))  # choices tried in one search
    iterations: int = number(10, Range(1, ANY))  # timed steps of a choice
    band: float = number(0.2, Range(0, 1e12, above=True))  # tolerated change of the step time, as a share of the best
    patience: int = number(50, Range(1, ANY))  # steps with a larger change before the next search
    cache: str | None = None  # file of results, which runs may share; null: tuned.json in log.dir


@dataclass(frozen=True, kw_only=True)
class MigrationConfig:
    """Migration of experts between ranks during training, to balance their load, see docs/migration.md."""

    enabled: bool = False
    every: int = number(50, Range(1, ANY))  # steps between two checks of the ranks' load, which is summed over them
    # experts move if the load of the busiest rank / mean of all ranks, over those steps, is above this
    threshold: float = number(1.2, Range(1, LARGE))
    patience: int = number(2, Range(1, ANY))  # checks in a row that find a block above the threshold before a move
    # steps (at most those that the run has left) in which a move must save the time that it takes; null: moves are free
    payback_steps: int | None = number(1000, Range(1, ANY))
    # extra positions of each expert rank, for copies of other ranks' experts
    replicas: int = number(0, Range(0, PARTS))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The output of a run: its folder, records, alarms, traces and sample."""

    dir: str = "runs/default"  # the folder of the run, also in a bucket (docs/object_stores.md)
    every: int = number(10, Range(1, ANY))  # steps between two records
    tensorboard: bool = True  # write TensorBoard files
    wandb_project: str | None = None  # Weights & Biases project for process 0, see docs/logging.md; null: none
    # every n-th record has the load of each expert of each block; null: n such that a record has at most 1,024 of
    # these numbers on average
    expert_load_every: int | None = number(None, Range(1, ANY))
    # alarms, each reported once until the block recovers; null: none. An expert that no token chose for this many steps
    alarm_unused_steps: int | None = number(100, Range(1, ANY))
    # a step's load whose entropy is below this share of an even load's
    alarm_entropy: float | None = number(0.5, Range(0, 1, below=True))
    # profile this step, or the steps from the first to the last ([10, 13]), into log.dir/trace; the first step of a
    # process cannot be traced, then the next one is
    trace_step: tuple[int, ...] | None = number(None, Range(2, ANY))
    sample_prompt: str = "\n"  # prompt of the text sampled at the end, for the report
    sample_tokens: int = number(400, SAMPLED)  # 0: no sample


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The cluster and the router for which `auto` settings are planned, see docs/plan.md."""

    cluster: str | None = None  # h100x64, or the file of a measured profile; null: the devices of the run
    # rows of the busiest expert rank / mean of all ranks, for experts without a capacity; 1: the router is balanced
    load_factor: float = number(1.0, Range(1, EXPERTS))


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All settings of one experiment, unchecked."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def may_wait_in_threads(self) -> bool:
        """Whether a step may wait in the host's threads for data that other devices send."""
        exchange = self.exchange
        return exchange.in_background or exchange.is_elsewhere or "algorithm" in self.tune.over

    @property
    def replicas(self) -> int:
        """The number of each expert rank's positions for copies of other ranks' experts."""
        return self.migration.replicas if self.migration.enabled else 0

    def expert_slots(self, sizes: Mapping[str, int]) -> int:
        """Return the positions of all ranks for the experts of one block and their copies, on a mesh of these sizes."""
        return self.model.moe.num_experts + self.replicas * self.mesh.expert_ranks(sizes)

    @property
    def step_kind(self) -> StepKindName:
        """The kind of training step that these settings require."""
        if self.mesh.pipeline > 1 or not self.schedule.pipeline_facts.needs_stages:
            return "pipelined"
        names = ("policy", "weight_grad", "grad_reduce", "param_gather")
        is_unscheduled = all(getattr(self.schedule, name) == getattr(ScheduleConfig, name) for name in names)
        return "plain" if is_unscheduled and self.exchange.reduction == "all_reduce" else "scheduled"

    @property
    def param_gather(self) -> Literal["none", "block", "prefetch"]:
        """When a step gathers the parameters of each block. A plain step does so right before the block; with pipeline
        stages all are gathered at once, before the step.
        """
        if self.optimizer.zero < 3 or self.step_kind == "pipelined":
            return "none"
        return "block" if self.step_kind == "plain" else self.schedule.param_gather

    @functools.cached_property
    def step_facts(self) -> StepFacts:
        """The properties of every step of this kind."""
        return STEP_FACTS[self.step_kind]
