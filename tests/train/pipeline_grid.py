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
MODELS: dict[str, dict[str, Any]] = {"even": {}, "uneven, tied": {"tie_embeddings": True}}
TIMES = (1, 2)  # as many parts of the batch as stages


def config_of(stages: int, expert: int, model: str, blocks: int, parts: int, schedule: dict[str, Any]) -> Config:
    layers = {"num_layers": blocks + (model != "even")}
    sizes = {"pipeline": stages, "batch_size": 2 * parts * expert, "seq_len": 6, "grad_accumulation": parts, "every": 1}
    return small_config(1, expert, **sizes, schedule=schedule, model=MODELS[model] | layers)


@functools.cache
def without_stages(expert: int, model: str, blocks: int, parts: int) -> Result:
    return result_of(config_of(1, expert, model, blocks, parts, {}))


@pytest.mark.parametrize(
    ("mesh", "times", "model", "pipeline"), list(itertools.product(MESHES, TIMES, MODELS, PIPELINES))
)
def test_a_pipelined_step_computes_what_a_step_without_stages_computes(mesh, times, model, pipeline):
    (stages, expert), schedule = mesh, PIPELINES[pipeline]
    blocks, parts = stages * schedule.get("virtual_stages", 1), times * stages
    result = result_of(config_of(stages, expert, model, blocks, parts, schedule))
    assert_same(result, without_stages(expert, model, blocks, parts))
