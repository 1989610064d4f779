"""Buffers of expert ranks in dropless plans: the factor for a router's load, and the cost of a factor.

`exchange.rank_capacity_factor` changes what training computes, because rows beyond a buffer are dropped. So a plan
never lowers it by itself: it chooses a factor only for a load that the user gives, with room to spare.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.memory import step_memory

_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_ROOM = 1.1  # times the load: it varies from step to step


class Price(NamedTuple):
    """The step of a plan with another rank capacity factor."""

    factor: float
    step_s: float
    memory_bytes: int


def factor_for(load: float) -> float:
    """The smallest usual factor that holds a load with room to spare; beyond them, the next whole number."""
    return next((factor for factor in _FACTORS if factor >= _ROOM * load), float(math.ceil(_ROOM * load)))


def with_load(draft: Draft, load: float) -> Draft:
    """The draft for a router of this load: with buffers for it, unless the file or the command line gives a factor."""
    planned = dataclasses.replace(draft, plan=dataclasses.replace(draft.plan, load_factor=load))
    if "exchange.rank_capacity_factor" in draft.given or not draft.model.moe.sends_sized_rows:
        return planned
    exchange = dataclasses.replace(draft.exchange, rank_capacity_factor=factor_for(load))
    return dataclasses.replace(planned, exchange=exchange)


def with_smaller_buffers(draft: Draft) -> Iterator[Draft]:
    """The draft with each smaller factor that holds its load, from the largest down. Rows beyond it are dropped."""
    if draft.model.moe.num_experts and draft.model.moe.sends_sized_rows:
        for factor in _smaller(draft.exchange.rank_capacity_factor, draft.plan.load_factor):
            yield dataclasses.replace(draft, exchange=dataclasses.replace(draft.exchange, rank_capacity_factor=factor))


def has_buffers(config: Config) -> bool:
    """Whether rows are sent to buffers of a fixed size, whose factor has a price."""
    moe = config.model.moe
    return bool(moe.num_experts) and moe.sends_sized_rows and config.mesh.expert_ranks(config.mesh.sizes) > 1


def prices(found: Estimate) -> Iterator[Price]:
    """The same plan with each smaller factor that holds its load, and with which it takes less time: what else it was
    chosen for may not suit a smaller one.
    """
    config = found.config
    for smaller in _smaller(config.exchange.rank_capacity_factor, config.plan.load_factor):
        other = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, rank_capacity_factor=smaller))
        device = found.cluster.device
        memory = step_memory(other, device.platform, other.mesh.sizes, device.capability)
        step_s = estimate(other, found.cluster).step_s
        if step_s < found.step_s:
            yield Price(smaller, step_s, memory.total)


def _smaller(factor: float | None, load: float) -> list[float]:
    """The usual factors below a factor that hold a load, from the largest down."""
    return [each for each in reversed(_FACTORS) if each >= load and (factor is None or each < factor)]
