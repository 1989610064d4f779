"""What a built-in part declares about itself: plain values, which settings, plans and schedules read without jax.

A part is one file, and its declaration is the file's `FACTS`; `config/registry.py` finds and reads it. The defaults
hold for a part that settings name as `package.module:name`, too, since such a part declares nothing.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

_LAST = 99


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every kind of part declares."""

    name: str | None = None  # by which settings know the part; None: the name of its file
    listed: int = _LAST  # its place in lists of parts, and where they are tried in turn; equal places: by name


class GateParameter(NamedTuple):
    """A parameter of a gate."""

    name: str
    dims: tuple[str, ...]  # names of its dimensions, see `config.gates.gate_parameters`
    first: Literal["router", "normal", "zeros"] | float = "router"  # values; normal: products keep their scale


ROUTER = GateParameter("router", ("model", "choices"))
ROUTER_BIAS = GateParameter("router_bias", ("choices",), "zeros")
SCORE_BIAS = GateParameter(
    "score_bias", ("choices",), "zeros"
)  # counts in the choice alone: nothing is differentiated by it


@dataclass(frozen=True, kw_only=True)
class GateFacts(Facts):
    """A file of `models/gates/`, which has a `GATE`.

    A gate splits if each token's experts follow from that token alone: then microbatches may be cut before the layer.
    Otherwise it compares all tokens of a device's batch.
    """

    splits: bool = True
    sees_tokens: bool = False  # looks at more than features: the token's number, its place in the batch, the step
    # whether tokens choose experts (TopKRouting), experts choose tokens for all their slots (ExpertChoiceRouting), or
    # slots mix all tokens (SoftRouting) and an expert has model.moe.slots_per_expert of them instead of a capacity
    decides: Literal["top_k", "expert_choice", "soft"] = "top_k"
    parameters: tuple[GateParameter, ...] = (ROUTER,)
    settings: tuple[str, ...] = ()  # of model.moe, which only gates that list them here read
    group_scorers: int | None = None  # experts whose scores rank a group of experts; None: it knows no groups
    sums_to_1: bool = False  # whether a token's weights always do, so that with one expert nothing teaches the router
    sampled_as: tuple[tuple[str, str | bool], ...] = ()  # settings of model.moe by which a single token is routed

    @property
    def fills_slots(self) -> bool:
        """Whether experts or slots choose tokens, so that no slot stays empty."""
        return self.decides != "top_k"

    @property
    def mixes(self) -> bool:
        """Whether slots are mixes of all tokens."""
        return self.decides == "soft"


@dataclass(frozen=True, kw_only=True)
class DispatcherFacts(Facts):
    """A file of `models/dispatchers/`, which has a `DISPATCHER`."""

    sorts_rows: bool = False  # by experts: such rows may travel with their sizes, and experts may change ranks


@dataclass(frozen=True, kw_only=True)
class HooksFacts(Facts):
    """A file of `models/hooks/`, which has `HOOKS`."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts(Facts):
    """A file of `parallel/all_to_all/`, which has `start` and `finish`."""

    by_node: bool = False  # by way of nodes: without them it is the flat one
    permutes: bool = False  # collective-permutes, which wait for the devices of all pipeline stages
    in_background: bool = False  # beside the program, in the host's threads: for CPUs
    only_starts: bool = False  # whether `start` only hands over, so that it returns before anything has arrived
    # only rows that exist, of microbatches: a scheduled step calls the file's own functions with their sizes
    ragged: bool = False
    counted_as: str = "flat"  # the form of `plan.exchange` by which its time is estimated


@dataclass(frozen=True, kw_only=True)
class ReductionFacts(Facts):
    """A file of `parallel/reductions/`, which has `reduce` and `scatter`, or `start`, `start_scatter` and `finish`."""

    in_background: bool = False  # as an exchange may be
    only_starts: bool = False  # as an exchange may: it has the two halves
    one_scatter: bool = False  # whether `scatter` is one reduce-scatter, for which TPUs are given whole tiles


@dataclass(frozen=True, kw_only=True)
class PolicyFacts(Facts):
    """A file of `schedule/policies/`, which has a `POLICY`."""

    cuts: Literal["batch", "capacity"] | None = "batch"  # what schedule.microbatches are parts of; None: it has one
    sends_ragged: bool = False  # whether a microbatch may travel without padding (ragged exchanges)
    planned: bool = False  # whether a plan tries it, in all degrees
    is_baseline: bool = False  # comparisons leave its weight gradients and reductions where they are


@dataclass(frozen=True, kw_only=True)
class PipelineFacts(Facts):
    """A file of `schedule/pipelines/`, which has an `order`."""

    least_chunks: int = 1  # model chunks of a stage
    most_chunks: int | None = 1  # None: any number
    split_weight_grad: bool = False  # whether weight gradients are a pass of their own
    needs_stages: bool = True  # otherwise one stage runs parts of a batch beside each other, too
    planned: tuple[int, ...] = ()  # numbers of model chunks with which a plan tries it
    tried: int = _LAST  # its place among those that a plan tries, of which the first of equals wins
