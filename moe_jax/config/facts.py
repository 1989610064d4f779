"""Declarations of built-in parts: plain values that settings, plans and schedules read without importing jax.

A part is a gate, a dispatcher, an optimizer and so on. It is one file, and its declaration is the file's `FACTS`, which
`config/registry.py` finds and reads. A part from another package (`package.module:name`) declares nothing: the defaults
below apply to it.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

_LAST = 99


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The declarations that all kinds of parts share."""

    name: str | None = None  # the name in settings; None: the name of the file
    listed: int = _LAST  # the position in lists of parts, and the order in which they are tried; ties go by name


class GateParameter(NamedTuple):
    """A parameter array of a gate."""

    name: str
    dims: tuple[str, ...]  # the names of its dimensions, see `config.gates.gate_parameters`
    first: Literal["router", "normal", "zeros"] | float = "router"  # initial values; normal: products keep their scale


ROUTER = GateParameter("router", ("model", "choices"))
ROUTER_BIAS = GateParameter("router_bias", ("choices",), "zeros")
# The score bias affects only which experts are chosen: it receives no gradient.
SCORE_BIAS = GateParameter("score_bias", ("choices",), "zeros")


@dataclass(frozen=True, kw_only=True)
class GateFacts(Facts):
    """The declaration of a file in `models/gates/`, which defines a `GATE`.

    A gate splits if the experts of a token depend on that token alone: then the batch may be split into microbatches
    before the layer. Any other gate compares all tokens of a device's batch.
    """

    splits: bool = True
    sees_tokens: bool = False  # the gate reads more than features: the token's id, its position in the batch, the step
    # who chooses: tokens choose experts (TopKRouting), experts choose tokens for all their slots (ExpertChoiceRouting),
    # or each slot is a mix of all tokens (SoftRouting); then an expert has model.moe.slots_per_expert slots and no
    # capacity
    decides: Literal["top_k", "expert_choice", "soft"] = "top_k"
    parameters: tuple[GateParameter, ...] = (ROUTER,)
    settings: tuple[str, ...] = ()  # settings of model.moe that only the gates which list them here read
    group_scorers: int | None = None  # the number of experts whose scores rank a group of experts; None: no groups
    for_timing_only: bool = False  # the choice depends on nothing learned and on no token: a run reports it
    sums_to_1: bool = False  # a token's weights always sum to 1, so that with k = 1 the router gets no gradient
    ignores_norm: bool = False  # weights are never divided by their sum, whatever model.moe.norm_topk_prob says
    sampled_as: tuple[tuple[str, str | bool], ...] = ()  # settings of model.moe that route a single token when sampling

    @property
    def fills_slots(self) -> bool:
        """Whether experts or slots choose tokens, so that no slot stays empty."""
        return self.decides != "top_k"

    @property
    def mixes(self) -> bool:
        """Whether each slot is a mix of all tokens."""
        return self.decides == "soft"


@dataclass(frozen=True, kw_only=True)
class DispatcherFacts(Facts):
    """The declaration of a file in `models/dispatchers/`, which defines a `DISPATCHER`."""

    # rows are sorted by expert; only such rows can be sent with their sizes, and only then can experts change ranks
    sorts_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class HooksFacts(Facts):
    """The declaration of a file in `models/hooks/`, which defines `HOOKS`."""

    row_item_bytes: int | None = None  # bytes of a number of a row that is sent; None: as the step computes it


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts(Facts):
    """The declaration of a file in `parallel/all_to_all/`, which defines `start` and `finish`."""

    by_node: bool = False  # hierarchical over nodes; without nodes it is the same as flat
    permutes: bool = False  # uses collective-permutes, which wait for the devices of all pipeline stages
    in_background: bool = False  # runs concurrently with the program, in the host's threads: for CPUs
    only_starts: bool = False  # `start` only hands the data over, and returns before any has arrived
    # sends only rows that exist, for microbatches: a scheduled step calls the file's own functions with their sizes
    ragged: bool = False
    counted_as: str = "flat"  # the form of `plan.exchange` that estimates its time


@dataclass(frozen=True, kw_only=True)
class ReductionFacts(Facts):
    """The declaration of a file in `parallel/reductions/`.

    The file defines `reduce` and `scatter`, or `start`, `start_scatter` and `finish`.
    """

    in_background: bool = False  # as for an exchange
    only_starts: bool = False  # as for an exchange: the file has the functions that start and finish
    one_scatter: bool = False  # `scatter` is a single reduce-scatter; on TPUs its input is padded to whole tiles
    any_shape: bool = False  # `reduce` takes arrays of any shape; others get flat vectors


@dataclass(frozen=True, kw_only=True)
class PolicyFacts(Facts):
    """The declaration of a file in `schedule/policies/`, which defines a `POLICY`."""

    cuts: Literal["batch", "capacity"] | None = "batch"  # what schedule.microbatches splits; None: one microbatch only
    sends_ragged: bool = False  # a microbatch may be sent without padding (ragged exchanges)
    planned: bool = False  # the planner tries it, with every number of microbatches
    is_baseline: bool = False  # comparisons do not move its weight gradients and reductions


@dataclass(frozen=True, kw_only=True)
class PipelineFacts(Facts):
    """The declaration of a file in `schedule/pipelines/`, which defines an `order`."""

    least_chunks: int = 1  # the fewest model chunks of a stage
    most_chunks: int | None = 1  # the most model chunks of a stage; None: any number
    split_weight_grad: bool = False  # weight gradients are passes of their own
    needs_stages: bool = True  # False: the order also overlaps the parts of a batch on a single stage
    planned: tuple[int, ...] = ()  # the numbers of model chunks that the planner tries
    tried: int = _LAST  # the position among the orders that the planner tries; of equally fast ones the first wins


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts(Facts):
    """The declaration of a file in `step/optimizers/`, which defines `scale`.

    Moments are arrays of a parameter's size that the state has for it.
    """

    settings: tuple[str, ...] = ()  # settings of optimizer that only the optimizers which list them here read
    moments: int = 2
    hidden_matrix_moments: int | None = None  # of matrices in blocks but a gate's; None: as many as others have
    end_matrix_moments: int | None = None  # of the embedding and the head
    orthogonalizes: bool = False  # Newton-Schulz iterations of those matrices in blocks

    @property
    def expert_moments(self) -> int:
        """Moments of an expert's matrices."""
        return self.moments if self.hidden_matrix_moments is None else self.hidden_matrix_moments

    @property
    def least_moments(self) -> int:
        """The fewest moments of any parameter."""
        return min(each for each in (self.moments, self.expert_moments, self.end_matrix_moments) if each is not None)
