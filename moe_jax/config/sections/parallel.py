"""The sections of parallelism: `mesh`, `schedule` and `exchange`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_jax.config.facts import ExchangeFacts, PipelineFacts, PolicyFacts
from moe_jax.config.ranges import ALONG_AXIS, BLOCKS, BUCKET, CLUSTER, EXPERTS, FINITE, PARTS, SIMULATED, Range, number
from moe_jax.config.registry import EXCHANGE_FACTS, PIPELINE_FACTS, POLICY_FACTS, REDUCTION_FACTS
from moe_jax.config.sections.hashing import HashedOnce

if TYPE_CHECKING:  # type checkers cannot evaluate the registries
    PipelineName = str
    ReductionName = str
else:
    PipelineName = Literal[tuple(PIPELINE_FACTS)]
    ReductionName = Literal[tuple(REDUCTION_FACTS)]


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
    # on GPUs: how many steps are traced, so that the compiler schedules the step by measured instead of estimated times
    # of its instructions, see docs/compiled.md; 0: none
    profile_steps: int = number(0, Range(0, 100))
    # periods of blocks unrolled in one iteration of the scan over blocks. On GPUs a plain step with all of them
    # unrolled takes less memory, and its kernels move fewer bytes: see docs/memory.md
    unroll: int = number(1, Range(1, BLOCKS))
    # on GPUs and TPUs: how much of a device's memory XLA may fill while it moves operations to hide communication; less
    # takes less memory, and hides less, see docs/memory.md; null: XLA's own, 95, or as much as fits into a GPU
    memory_percent: int | None = number(None, Range(1, 100))
    # what the backward pass recomputes, see docs/architecture.md; chunk, with pipeline stages: a model chunk's whole
    # forward pass, exchanges included
    remat: Literal["none", "dots", "full", "chunk"] = "none"
    # what the loop over blocks of a scheduled step saves for the backward pass is in the memory of the host, but for
    # two iterations, see docs/memory.md
    offload_activations: bool = False
    # with mesh.pipeline above 1: the order in which stages process the parts of train.grad_accumulation, see
    # docs/pipelines.md; coscheduled works without stages, too: it overlaps one part's backward pass with the next
    # one's forward pass
    pipeline: PipelineName = "1f1b"
    virtual_stages: int = number(1, Range(1, PARTS))  # groups of blocks of each stage (model chunks)
    # the head costs as much as this many periods of blocks: the last stage gets that many fewer, but at least one; with
    # multi-token prediction one fewer besides, as its block runs there
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
    # (sharded), its own rows in chunks whose gathers overlap with the next exchange (sharded_chunked), or also their
    # copies (sharded_overlapped), or its own rows with the gathers as tasks of the schedule (sharded_scheduled)
    tensor_form: Literal["replicated", "sharded", "sharded_chunked", "sharded_overlapped", "sharded_scheduled"] = (
        "sharded"
    )
    tensor_chunks: int = number(2, Range(1, PARTS))  # chunks of sharded_chunked and sharded_overlapped
    # attention over context ranks, see docs/context.md: keys and values go around a ring while attention is computed
    # with those already received, or all are gathered first
    context_form: Literal["ring", "all_gather"] = "ring"
    # sum of gradients over devices: scatter_gather, ring or background, see docs/exchange.md
    reduction: ReductionName = "all_reduce"
    # without a capacity: buffer size of a rank for the rows of each sequence / their even share; rows beyond it are
    # dropped, and the run reports them. null: the buffer holds all rows, so that none is ever dropped.
    # At least 1: with less, even a balanced router's rows would be dropped
    rank_capacity_factor: float | None = number(3.0, Range(1, EXPERTS))
    # without a capacity: the most experts of a block that each step copies to all expert ranks, chosen by its own load;
    # each rank computes its own tokens of them, see docs/migration.md
    hot_experts: int = number(0, Range(0, PARTS))

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
