"""The load of experts and of ranks, from a run's records.

Sizes: R records with loads, M blocks with experts, E experts, L checks of the ranks' load (docs/migration.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.report.numbers import Records
from moe_jax.report.plots import Array


class RankMove(NamedTuple):
    """Experts that changed ranks at a step.

    A load is that of the busiest rank / mean of all ranks, in the worst of the blocks with moved experts.
    """

    step: int
    blocks: tuple[int, ...]
    pairs: int  # pairs of experts that swapped places
    before: float  # load over the steps up to this one
    planned: float
    after: float | None  # load over the steps up to the next check; None: there has been no check yet


class Loads(NamedTuple):
    """The loads of a run, relative to an even load. Arrays are empty if no record has their values."""

    step_R: Array
    expert_RME: Array
    check_L: Array  # steps of the checks
    rank_LM: Array  # load of the busiest rank, over the steps since the previous check
    moves: tuple[RankMove, ...]


def loads_of(records: Records) -> Loads:
    """Return the loads in a run's records."""
    with_experts = [record for record in records if record.get("expert_load")]
    checks = [record for record in records if record.get("rank_load")]
    share_RME = _array([record["expert_load"] for record in with_experts])
    return Loads(
        step_R=_array([record["step"] for record in with_experts]),
        expert_RME=share_RME * share_RME.shape[-1],
        check_L=_array([check["step"] for check in checks]),
        rank_LM=_array([check["rank_load"] for check in checks]),
        moves=tuple(_move(checks[i:]) for i, check in enumerate(checks) if "migrated_blocks" in check),
    )


def _array(values: Sequence[object]) -> Array:
    return np.array(values, dtype=np.float64)


def _move(checks: Records) -> RankMove:
    """Return the move after the first of these checks."""
    blocks = tuple(checks[0]["migrated_blocks"])
    before, *after = (max(check["rank_load"][block] for block in blocks) for check in checks[:2])
    return RankMove(
        step=checks[0]["step"],
        blocks=blocks,
        pairs=sum(checks[0]["migration_swaps"]),
        before=before,
        planned=max(checks[0]["migration_load_after"]),
        after=after[0] if after else None,
    )
