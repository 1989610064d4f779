"""What a run's records say of the load of experts and of ranks.

R records that have loads, M blocks with experts, E experts, L looks at the load of ranks (docs/migration.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.report.numbers import Records
from moe_jax.report.plots import Array


class RankMove(NamedTuple):
    """Experts that changed ranks. Loads are the busiest rank's / mean, of the worst block whose experts did."""

    step: int
    blocks: tuple[int, ...]
    pairs: int  # of experts that took each other's place
    before: float  # over the steps up to this one
    planned: float
    after: float | None  # over the steps up to the next look; None: there has been none


class Loads(NamedTuple):
    """Of a run, 1 = even. What no record has is an empty array."""

    step_R: Array
    expert_RME: Array
    look_L: Array  # steps
    rank_LM: Array  # the busiest rank, over the steps since the look before
    moves: tuple[RankMove, ...]


def loads_of(records: Records) -> Loads:
    """Of those records that have them."""
    having = [record for record in records if record.get("expert_load")]
    looks = [record for record in records if record.get("rank_load")]
    share_RME = _array([record["expert_load"] for record in having])
    return Loads(
        step_R=_array([record["step"] for record in having]),
        expert_RME=share_RME * share_RME.shape[-1],
        look_L=_array([look["step"] for look in looks]),
        rank_LM=_array([look["rank_load"] for look in looks]),
        moves=tuple(_move(looks[i:]) for i, look in enumerate(looks) if "migrated_blocks" in look),
    )


def _array(values: Sequence[object]) -> Array:
    return np.array(values, dtype=np.float64)


def _move(looks: Records) -> RankMove:
    """That of the first look."""
    blocks = tuple(looks[0]["migrated_blocks"])
    before, *after = (max(look["rank_load"][block] for block in blocks) for look in looks[:2])
    return RankMove(
        step=looks[0]["step"],
        blocks=blocks,
        pairs=sum(looks[0]["migration_swaps"]),
        before=before,
        planned=max(looks[0]["migration_load_after"]),
        after=after[0] if after else None,
    )
