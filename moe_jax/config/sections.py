"""What an experiment is: frozen sections of plain values.

Sizes are counted in tokens, sequences, blocks or features as their comments say; fractions are of 1.
`config/validate/` says which values they may have; `config/yaml_io.py` reads them from YAML and the command line.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from moe_jax.config.facts import ExchangeFacts, GateFacts, PipelineFacts, PolicyFacts
from moe_jax.config.ranges import (
    ALONG_AXIS,
    ANY,
    BLOCKS,
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
    PIPELINE_FACTS,
    POLICY_FACTS,
    REDUCTION_FACTS,
)
from moe_jax.config.step_kinds import STEP_FACTS, StepFacts, StepKindName

if TYPE_CHECKING:  # a type checker does not read the files of parts
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
    intermediate_size: int = number(512, Range(1, WIDTH))  # of one expert
    # experts that see every token, as one MLP of their joint width
    num_shared_experts: int = number(0, Range(0, PARTS))
    shared_gate: bool = False  # whose output is times a sigmoid of the token's features (Qwen2-MoE)
    dense_residual: bool = False  # beside the experts, the MLP of a dense block (Arctic)
    bias: bool = False  # vectors added to the router's logits and behind each matrix of an expert
    # slots per expert / even share; null: dropless
    capacity_factor: float | None = number(1.25, Range(0, EXPERTS, above=True))
    # pairs of a step, counted from 1, and the factor from there on: [[1000, 1.5], [5000, 1.0]]
    capacity_schedule: tuple[tuple[float, ...], ...] = number((), Range(0, ANY, above=True))
    gate: str = "softmax"  # one of docs/gates.md, or package.module:function, see docs/extend.md
    norm_topk_prob: bool = True  # the k weights of a token sum to 1 (if k > 1)
    # with top_k=1, too: the one weight is 1, as in Mixtral, and the loss gives the router no gradient. Otherwise it is
    # the expert's score, as in Switch
    norm_top1_prob: bool = False
    routed_scaling_factor: float = number(1.0, Range(0, LARGE, above=True))  # factor on the routed experts' output
    # gates deepseek_v2 and deepseek_v3: the experts are in so many groups, in order,
    n_group: int = number(1, Range(1, EXPERTS))
    topk_group: int = number(1, Range(1, EXPERTS))  # and those of a token in so many of them
    # gate xmoe: the width in which tokens and experts meet; null: half the experts
    router_rank: int | None = number(None, Range(1, 2**17))
    slots_per_expert: int = number(1, Range(1, 2**20))  # gate softmoe: on each source device, instead of a capacity
    # how tokens reach their slots: sort, einsum (GShard's one-hot product), or package.module:name of an Order
    dispatcher: str = "sort"
    # around the layer and its exchanges: none, bf16 or fp8 (rows travel as bfloat16, which is nothing new if they are
    # computed in it, or as 8-bit floats), or package.module:name of Hooks
    hooks: str = "none"
    # operands of routed experts' matrix products: as train.compute_dtype has them, or rounded to 8-bit floats, see
    # docs/models.md
    expert_matmuls: Literal["compute_dtype", "fp8"] = "compute_dtype"
    first_k_dense_replace: int = number(0, Range(0, BLOCKS))  # blocks at the bottom that have a dense MLP instead
    moe_layer_freq: int = number(1, Range(1, BLOCKS))  # above those, every n-th block has experts
    aux_loss_coeff: float = number(0.01, Range(0, LARGE))
    # whose loads the load-balance loss sees: each block's of the whole batch (a part of train.grad_accumulation), those
    # of all blocks pooled, or each block's of every sequence by itself, see docs/balance.md
    load_balancing_type: Literal["batch", "pooled", "sequence"] = "batch"
    # of gates softmax, sigmoid and deepseek_v3: how far a step moves each expert's score bias against its load, see
    # docs/balance.md; null: there is none, or it stays as it is
    bias_update_rate: float | None = number(None, Range(0, LARGE))
    z_loss_coeff: float = number(0.001, Range(0, LARGE))

    @property
    def gate_facts(self) -> GateFacts:
        """What is known of the gate without computing it."""
        return GATE_FACTS.of(self.gate)

    @property
    def has_hooks(self) -> bool:
        """Whether functions are called around the layer and its exchanges."""
        return self.hooks != NO_HOOKS

    @property
    def divides_by_sum(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        return self.norm_topk_prob and (self.top_k > 1 or self.norm_top1_prob)

    @property
    def latent_router_width(self) -> int:
        """In which tokens and experts meet, if the gate projects both."""
        return self.router_rank or max(self.num_experts // 2, 1)

    @property
    def sorts_rows(self) -> bool:
        """Whether tokens that chose experts are sorted into rows."""
        return DISPATCHER_FACTS.of(self.dispatcher).sorts_rows and not self.gate_facts.fills_slots

    @property
    def sends_capacity_rows(self) -> bool:
        """Whether tokens reach slots of a limited number as sorted rows."""
        return self.capacity_factor is not None and self.sorts_rows

    @property
    def sends_sized_rows(self) -> bool:
        """Whether experts have no capacity, and sorted rows travel with their sizes."""
        return self.capacity_factor is None and self.sorts_rows


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): all keys and values are made of one short vector."""

    # width of that latent; null: no latents, grouped-query attention
    kv_lora_rank: int | None = number(None, Range(1, 2**17))
    # of the queries' latent; null: queries are made of the model width
    q_lora_rank: int | None = number(None, Range(1, 2**17))
    qk_nope_head_dim: int = number(128, Range(1, 2**16))  # of a query and key, the part that is not rotated
    qk_rope_head_dim: int = number(64, Range(2, 2**16))  # and the part that is; all heads have the same key there
    v_head_dim: int = number(128, Range(1, 2**16))
    # of the latents' norms; null: model.rms_norm_eps
    rms_norm_eps: float | None = number(None, Range(0, 1, above=True))


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What a token's attention sees, and what is added to it."""

    bias: bool = False  # vectors added behind the projections
    out_bias: bool = True  # with them, one behind the last projection, too (not in Qwen2-MoE)
    sinks: bool = False  # a learned logit of each head that no value belongs to (gpt-oss)
    # tokens that a token sees, itself included; null: all before it
    sliding_window: int | None = number(None, Range(1, ANY))
    full_every: int | None = number(None, Range(1, ANY))  # every n-th block has no window
    nope_every: int | None = number(None, Range(1, ANY))  # every n-th block has no rotary embedding (Llama 4)


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary frequencies for sequences that are longer than those a model began with, see docs/models.md.

    A pair of features turns so many times in `original_max_position_embeddings` tokens. Frequencies of up to
    `slow_turns` are divided by `factor`, those of `fast_turns` or more stay, and between them is a ramp.
    """

    rope_type: Literal["none", "linear", "llama3", "yarn"] = "none"  # linear: all frequencies are divided
    factor: float = number(1.0, Range(1, LARGE))
    original_max_position_embeddings: int = number(4096, Range(1, ANY))  # tokens
    slow_turns: float = number(1.0, Range(0, LARGE, above=True))
    fast_turns: float = number(32.0, Range(0, LARGE, above=True))
    truncate: bool = True  # yarn: the ramp is between whole numbers of pairs
    attention_factor: float = number(1.0, Range(0, LARGE, above=True))  # on queries and keys that are rotated
    # m of DeepSeek: attention's logits times (0.1·m·ln(factor) + 1)²
    mscale_all_dim: float = number(0.0, Range(0, LARGE))


class AttentionView(NamedTuple):
    """How attention of one block sees tokens."""

    window: int | None
    rope: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: pre-norm blocks of attention and an MLP or MoE layer."""

    vocab_size: int = number(256, Range(2, 2**24))
    hidden_size: int = number(256, Range(2, 2**17))
    num_layers: int = number(4, Range(1, BLOCKS))
    num_attention_heads: int = number(4, Range(1, 2**14))
    # null: as many as num_attention_heads; fewer: grouped-query attention
    num_key_value_heads: int | None = number(None, Range(1, 2**14))
    head_dim: int | None = number(None, Range(2, 2**16))  # null: hidden_size / num_attention_heads
    intermediate_size: int = number(1024, Range(1, WIDTH))  # of the MLP in dense blocks
    # of MLPs and experts; clipped_swiglu: values within 7, and 1 more of what is not gated (gpt-oss)
    activation: Literal["swiglu", "gelu", "clipped_swiglu"] = "swiglu"
    qk_norm: bool = False  # RMSNorm on queries and keys
    qk_norm_over: Literal["head", "projection"] = "head"  # each head for itself, or all together (OLMoE)
    tie_word_embeddings: bool = False  # one matrix for the embedding and the head
    rope_theta: float = number(10_000.0, Range(1, 1e15))
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    rms_norm_eps: float = number(1e-6, Range(0, 1, above=True))
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_gated(self) -> bool:
        """Whether MLPs and experts have two matrices in front of their activation."""
        return self.activation != "gelu"

    @property
    def has_latents(self) -> bool:
        return self.latent.kv_lora_rank is not None

    @property
    def qk_width(self) -> int:
        """Of a head's query and key."""
        latent = self.latent
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim if self.has_latents else self.head_width

    @property
    def v_width(self) -> int:
        """Of a head's value."""
        return self.latent.v_head_dim if self.has_latents else self.head_width

    @property
    def views(self) -> tuple[AttentionView, ...]:
        """How each block's attention sees tokens, from the bottom up."""
        attention = self.attention

        def is_nth(block: int, every: int | None) -> bool:
            return every is not None and (block + 1) % every == 0

        return tuple(
            AttentionView(
                window=None if is_nth(i, attention.full_every) else attention.sliding_window,
                rope=not is_nth(i, attention.nope_every),
            )
            for i in range(self.num_layers)
        )

    @functools.cached_property
    def block_kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """What each block has behind its attention, from the bottom up."""
        moe = self.moe
        first = moe.first_k_dense_replace
        return tuple(
            "moe" if moe.num_experts and i >= first and (i - first + 1) % moe.moe_layer_freq == 0 else "dense"
            for i in range(self.num_layers)
        )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each named axis. One axis may be -1: all that the others leave."""

    data: int = number(-1, ALONG_AXIS)
    expert: int = number(1, ALONG_AXIS)
    pipeline: int = number(1, ALONG_AXIS)
    tensor: int = number(1, ALONG_AXIS)
    context: int = number(1, ALONG_AXIS)
    experts_over_context: bool = False  # cut experts over the context ranks, too, see docs/context.md
    cpu_devices: int | None = number(None, SIMULATED)  # simulate this many devices on the CPU; null: use what there is

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, by its name."""
        return {
            "data": self.data,
            "expert": self.expert,
            "pipeline": self.pipeline,
            "tensor": self.tensor,
            "context": self.context,
        }

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Those that cut experts, as one."""
        return ("context", "expert") if self.experts_over_context else ("expert",)

    def expert_ranks(self, sizes: Mapping[str, int]) -> int:
        """That have experts of their own, on a mesh of these sizes."""
        return math.prod(sizes[axis] for axis in self.expert_axes)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """In which order an iteration's tasks run."""

    policy: str = "vanilla"  # expert_pipeline, unified, or package.module:name of a Policy, see docs/extend.md
    # unified: parts of a device's sequences; expert_pipeline: of the slots
    microbatches: int = number(1, Range(1, PARTS))
    backward_microbatches: int | None = number(None, Range(1, PARTS))  # null: as many; unified: a divisor
    # unified: parts of a microbatch's slots, which exchanges and experts see one by one
    expert_chunks: int = number(1, Range(1, PARTS))
    weight_grad: Literal["inline", "greedy"] = "inline"  # greedy: where compute would wait for an exchange
    grad_reduce: Literal["end", "block", "bucketed"] = "end"  # when gradients are summed over devices
    # largest chunk of a bucketed reduction, 10⁶ bytes; null: a whole matrix
    bucket_cap_mb: float | None = number(None, Range(0, LARGE, above=True))
    # rates that tasks are timed with, 10¹² flop/s and 10⁹ byte/s;
    device_tflops: float | None = number(None, Range(0, FINITE, above=True))
    link_gb_per_s: float | None = number(None, Range(0, FINITE, above=True))  # null: typical of the platform
    network_gb_per_s: float | None = number(None, Range(0, FINITE, above=True))  # the same beyond a node of GPUs
    task_times: str | None = None  # a file of measured seconds (plan/measured.py), used instead of estimates
    unroll: int = number(1, Range(1, BLOCKS))  # periods of blocks unrolled in one turn of the scan over blocks
    remat: Literal["none", "dots", "full"] = "none"  # what backward recomputes, see docs/architecture.md
    # with mesh.pipeline above 1: the order in which its stages work through the parts of train.grad_accumulation, as
    # docs/pipelines.md has them; coscheduled also without stages: one part's backward pass beside the next one's
    # forward pass
    pipeline: PipelineName = "1f1b"
    virtual_stages: int = number(1, Range(1, PARTS))  # groups of blocks that each stage holds (model chunks)
    # the head takes as long as so many periods of blocks: the last stage holds fewer, but one
    head_blocks: int = number(0, Range(0, BLOCKS))

    @property
    def policy_facts(self) -> PolicyFacts:
        """What the policy declares; one from elsewhere is taken to cut the batch."""
        return POLICY_FACTS.of(self.policy)

    @property
    def pipeline_facts(self) -> PipelineFacts:
        """What the order of pipeline stages declares."""
        return PIPELINE_FACTS.of(self.pipeline)

    @property
    def cuts_batch(self) -> bool:
        """Whether microbatches are parts of a device's sequences; those of a policy from elsewhere may be."""
        return self.policy_facts.cuts == "batch"


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """In which form tokens and gradients travel between devices."""

    # all-to-all: flat, one collective; ring, collective-permutes; hier_1d, hier_2d and halo, by way of nodes, see
    # docs/exchange.md; ragged, only existing rows (microbatches; auto: on TPU and GPU); background, beside the program
    # (CPU); package.module:name of an Exchange, see docs/extend.md
    algorithm: str = "auto"
    # of the expert axis, joined by fast links; null: as devices tell
    ranks_per_node: int | None = number(None, CLUSTER)
    # how tensor ranks share an exchange, see docs/exchange.md: all rows from each of them (replicated), its own rows
    # (o1), in chunks whose gathers run beside the next exchange (o2), and whose copies do, too (o3)
    tensor_form: Literal["replicated", "o1", "o2", "o3"] = "o1"
    tensor_chunks: int = number(2, Range(1, PARTS))  # of o2 and o3
    # how attention sees the tokens of other context ranks, see docs/context.md: their keys and values go around a ring
    # while those that came are computed with, or all are gathered first
    context_form: Literal["ring", "all_gather"] = "ring"
    reduction: ReductionName = "all_reduce"  # of gradients: scatter_gather, ring or background, see docs/exchange.md
    # without a capacity: rows that a rank has room for from each sequence / its even share; more are dropped, which the
    # run says. null: for all rows to choose one rank, so that none is ever dropped
    # with less even a balanced router's rows would be dropped
    rank_capacity_factor: float | None = number(3.0, Range(1, EXPERTS))

    @property
    def facts(self) -> ExchangeFacts:
        """What the algorithm declares."""
        return EXCHANGE_FACTS.of(self.algorithm)

    @property
    def in_background(self) -> bool:
        """Whether tokens or gradients travel beside the program, in the host's threads."""
        return self.facts.in_background or REDUCTION_FACTS.of(self.reduction).in_background

    @property
    def is_elsewhere(self) -> bool:
        """Whether the algorithm is none of the project's own."""
        return ":" in self.algorithm


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    path: str = "configs/text/shakespeare.txt"  # a .txt file (read as bytes), or a folder of token files
    seq_len: int = number(256, Range(2, SEQUENCE))  # tokens per sequence
    # of a .txt file: its end; a folder has its own validation file
    validation_fraction: float = number(0.1, Range(0, 1, above=True, below=True))
    prefetch: int = number(8, Range(0, PARTS))  # batches read ahead
    # pieces of a prepared file that may be damaged and are passed over, see docs/data.md
    damaged_chunks: int = number(0, Range(0, ANY))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW behind a warm-up, a decay and a clip by the global norm."""

    learning_rate: float = number(1e-3, Range(0, LARGE))  # at the end of the warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = number(100, Range(0, ANY))  # before the first step at learning_rate
    final_fraction: float = number(0.1, Range(0, 1))  # of learning_rate, in the last step of train.steps
    beta1: float = number(0.9, Range(0, 1, below=True))
    beta2: float = number(0.95, Range(0, 1, below=True))
    eps: float = number(1e-8, Range(0, LARGE, above=True))
    weight_decay: float = number(0.1, Range(0, LARGE))  # on matrices; vectors are not decayed
    clip_norm: float | None = number(1.0, Range(0, FINITE, above=True))  # null: no clipping
    # what is cut over the devices that hold the same parameters (ZeRO): 0, nothing; 1, moments; 2, gradients, too: with
    # train.grad_accumulation those of each part of a batch are summed by themselves
    zero: Literal[0, 1, 2] = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and in which precision."""

    steps: int = number(1000, Range(1, ANY))
    seed: int = number(0, SEEDS)
    batch_size: int = number(32, Range(1, 2**20))  # sequences in one optimiser step, over all devices
    # parts of a batch, one after another; each fills slots and is balanced by itself
    grad_accumulation: int = number(1, Range(1, 2**16))
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters and router stay float32
    # of attention, see docs/models.md. cudnn: flash attention, in bfloat16 on NVIDIA's GPUs; xla: with the logits of
    # all pairs of tokens in memory; auto: cudnn where it can
    attention_kernel: Literal["auto", "xla", "cudnn"] = "auto"
    # how rows of experts without a capacity are multiplied, see docs/measure.md: blocks, a tile of rows after another;
    # ragged, XLA's own; pallas, a kernel (GPU); auto: on GPUs what is fastest here, else the platform's own
    grouped_product: Literal["auto", "blocks", "ragged", "pallas"] = "auto"
    # tokens of a device whose logits are in memory at a time, at most, see docs/memory.md; null: as many as have 2²⁷ of
    # them (512 MiB)
    loss_chunk: int | None = number(None, Range(1, ANY))
    # with mesh.cpu_devices and jax below 0.11: XLA's older emitters, which compile a step in half the time. With other
    # schedules or chunks of gradients losses are then the same but for their last bits, not bit for bit
    quick_compile: bool = False
    # what a new run begins with: the folder of a Hugging Face model, or of a run; null: random numbers. See
    # docs/convert.md
    init_from: str | None = None
    upcycle: bool = False  # that model is dense, and each expert begins as its MLP
    eval_every: int = number(250, Range(0, ANY))  # steps; 0: only at the end
    eval_batches: int = number(8, Range(1, ANY))  # no more than the text has
    # steps in a row whose loss or gradient is not finite, and that change nothing, before the run goes back to its
    # newest checkpoint, and the next time stops; null: never. See docs/bad_numbers.md
    bad_in_a_row: int | None = number(3, Range(1, ANY))
    spike_factor: float | None = number(None, Range(1, FINITE))  # loss / median of the last 64 that is told; null: none
    skip_spikes: bool = False  # and counts as bad


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the training state is saved (below log.dir) and how much is kept."""

    every: int = number(500, Range(0, ANY))  # steps; 0: only at the end
    keep: int = number(2, Range(1, ANY))
    resume: bool = True  # go on from the newest checkpoint in log.dir, if there is one
    # steps between two safety copies of the state in the memory of two nodes, see docs/recovery.md; 0: none
    safety_copies_every: int = number(0, Range(0, ANY))
    safety_copies_dir: str = "/dev/shm"  # where they are; a folder of each node, in memory


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings that a run tries while it trains, to go on with the fastest, see docs/tune.md."""

    # schedule.bucket_cap_mb, schedule.microbatches, exchange.algorithm; none: all settings stay as they are
    over: tuple[Literal["bucket_cap_mb", "microbatches", "algorithm"], ...] = ()
    samples: int = number(8, Range(2, PARTS))  # choices tried in one search
    iterations: int = number(10, Range(1, ANY))  # steps that a choice is timed for
    band: float = number(0.2, Range(0, 1e12, above=True))  # by which share of the best time a step's may change
    patience: int = number(50, Range(1, ANY))  # steps for which it has to have changed by more before the next search
    cache: str | None = None  # file of what was found, for other runs, too; null: tuned.json in log.dir


@dataclass(frozen=True, kw_only=True)
class MigrationConfig:
    """Experts that change ranks while a run trains, so that ranks are loaded alike, see docs/migration.md."""

    enabled: bool = False
    every: int = number(50, Range(1, ANY))  # steps between two looks at the load of ranks, which is added up meanwhile
    # load of the busiest rank / mean of all, over those steps, that is too much
    threshold: float = number(1.2, Range(1, LARGE))
    patience: int = number(2, Range(1, ANY))  # looks in a row at which a block was above it before its experts move
    # steps in which a move has to save the time that it takes, and no more than the run has left; null: moves are free
    payback_steps: int | None = number(1000, Range(1, ANY))
    replicas: int = number(0, Range(0, PARTS))  # slots of each expert rank for copies of experts that others have, too


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run leaves behind."""

    dir: str = "runs/default"
    every: int = number(10, Range(1, ANY))  # steps between two lines
    tensorboard: bool = True
    wandb_project: str | None = None  # at Weights & Biases, of process 0, see docs/logging.md; null: none
    # every n-th record has the load of each expert of each block; null: as many records as keep it to 1,024 numbers in
    # each on average
    expert_load_every: int | None = number(None, Range(1, ANY))
    # warnings, once until the block recovers: an expert that no token chose for so many steps; a step's load whose
    # entropy is a smaller part of an even load's. null: none
    alarm_unused_steps: int | None = number(100, Range(1, ANY))
    alarm_entropy: float | None = number(0.5, Range(0, 1, below=True))
    # run this step, or those from the first to the last ([10, 13]), under jax's profiler, into log.dir/trace; the first
    # step of a process is not traced, but the next
    trace_step: tuple[int, ...] | None = number(None, Range(2, ANY))
    sample_prompt: str = "\n"  # of the text sampled at the end, for the report
    sample_tokens: int = number(400, SAMPLED)  # 0: no sample


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """For what settings are planned that say auto (docs/plan.md)."""

    cluster: str | None = None  # h100x64, or the file of a measured profile; null: the devices of the run


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
        """Whether a step may wait in the host's threads for what other devices send beside the program."""
        exchange = self.exchange
        return exchange.in_background or exchange.is_elsewhere or "algorithm" in self.tune.over

    @property
    def replicas(self) -> int:
        """Slots of each expert rank for copies of others' experts."""
        return self.migration.replicas if self.migration.enabled else 0

    def expert_slots(self, sizes: Mapping[str, int]) -> int:
        """Of all ranks, on a mesh of these sizes, for the experts of one block and their copies."""
        return self.model.moe.num_experts + self.replicas * self.mesh.expert_ranks(sizes)

    @property
    def step_kind(self) -> StepKindName:
        """Which kind of training step these settings ask for."""
        if self.mesh.pipeline > 1 or not self.schedule.pipeline_facts.needs_stages:
            return "pipelined"
        unscheduled = ScheduleConfig()
        names = ("policy", "weight_grad", "grad_reduce")
        is_unscheduled = all(getattr(self.schedule, name) == getattr(unscheduled, name) for name in names)
        return "plain" if is_unscheduled and self.exchange.reduction == "all_reduce" else "scheduled"

    @property
    def step_facts(self) -> StepFacts:
        """What holds for every step of this kind."""
        return STEP_FACTS[self.step_kind]
