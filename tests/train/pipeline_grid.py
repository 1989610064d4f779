"""Every pipeline schedule on every mesh, against the same step without stages: pytest tests/train/pipeline_grid.py

Minutes; `test_pipeline.py` has some of these cases, with other policies inside a pass.
"""

import functools
import itertools
from typing import Any

import pytest

from moe_jax.config import Config
from tests.small import small_config
from tests.train.test_pipeline import PIPELINES, Result, assert_same, result_of

MESHES = [(2, 1), (2, 2), (4, 2), (2, 4), (8, 1)]  # pipeline, expert
# Blocks more than stages divide, tied embeddings; parts of the batch for so many stages
CASES = {
    "even, S": (0, False, lambda stages: stages),
    "even, 2S": (0, False, lambda stages: 2 * stages),
    "even, tied, S+1": (0, True, lambda stages: stages + 1),
    "uneven, S+1": (1, False, lambda stages: stages + 1),
    "uneven, tied, S": (1, True, lambda stages: stages),
    "uneven, tied, 2S": (1, True, lambda stages: 2 * stages),
}


def config_of(stages: int, expert: int, blocks: int, tied: bool, parts: int, schedule: dict[str, Any]) -> Config:
    model = {"num_layers": blocks, "tie_embeddings": tied}
    sizes = {"pipeline": stages, "batch_size": 2 * parts * expert, "seq_len": 6, "grad_accumulation": parts, "every": 1}
    return small_config(1, expert, **sizes, schedule=schedule, model=model)


@functools.cache
def without_stages(expert: int, blocks: int, tied: bool, parts: int) -> Result:
    return result_of(config_of(1, expert, blocks, tied, parts, {}))


def parts_of(mesh: tuple[int, int], case: str) -> int:
    return CASES[case][2](mesh[0])


def exists(mesh: tuple[int, int], case: str, pipeline: str) -> bool:
    """Chunks need groups of as many parts as there are stages."""
    return "virtual_stages" not in PIPELINES[pipeline] or parts_of(mesh, case) % mesh[0] == 0


@pytest.mark.parametrize(
    ("mesh", "case", "pipeline"), [each for each in itertools.product(MESHES, CASES, PIPELINES) if exists(*each)]
)
def test_a_pipelined_step_computes_what_a_step_without_stages_computes(mesh, case, pipeline):
    (stages, expert), schedule, (more, tied, _) = mesh, PIPELINES[pipeline], CASES[case]
    blocks, parts = stages * schedule.get("virtual_stages", 1) + more, parts_of(mesh, case)
    result = result_of(config_of(stages, expert, blocks, tied, parts, schedule))
    assert_same(result, without_stages(expert, blocks, tied, parts))
