"""The plan of a step: measured times of tasks, and processes that have to agree on them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_jax.config import Config, OptimizerConfig
from moe_jax.distributed import processes
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.gradients import sums_of
from moe_jax.plan.measured import write_times
from moe_jax.step.scheduled.build import make_plan, reductions_of
from tests.small import small_config
from tests.step.gradients import mesh_of

GREEDY = {"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "bucketed"}


def timed(path: Path, seconds: float) -> Config:
    """A config with a file in which the experts' weight gradients take so long."""
    write_times(path, {"expert": {1: {"F": 0.1, "B": 0.1, "W": seconds}}}, 0.0)
    config = small_config(1, 2, schedule=GREEDY, batch_size=16, moe_layer_freq=1)
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, task_times=str(path)))


def test_measured_times_decide_the_order(tmp_path: Path) -> None:
    config = timed(tmp_path / "short.json", 1e-9), timed(tmp_path / "long.json", 10)
    short, long = (str(make_plan(each, mesh_of(each)).schedule) for each in config)
    assert sorted(short.split()) == sorted(long.split())
    assert short != long


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray], None]:
    """A second process that has read something else, or the same."""

    def answer(of: Callable[[np.ndarray], np.ndarray]) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda own: np.stack([own, of(own)]))

    return answer


def test_processes_with_the_same_times_continue(tmp_path: Path, other_process: Callable) -> None:
    config = timed(tmp_path / "times.json", 1)
    mesh = mesh_of(config)
    other_process(lambda own: own)
    assert make_plan(config, mesh).schedule


def test_processes_with_other_times_are_refused(tmp_path: Path, other_process: Callable) -> None:
    config = timed(tmp_path / "times.json", 1)
    mesh = mesh_of(config)
    other_process(lambda own: own + 2)
    with pytest.raises(ConfigError, match="is not the same on all processes: give them copies of one file"):
        make_plan(config, mesh)


def test_a_process_that_cannot_read_its_times_reports_to_the_others_first(
    tmp_path: Path, other_process: Callable
) -> None:
    """Else these would wait for it."""
    reported = []
    config = timed(tmp_path / "times.json", 1)
    mesh = mesh_of(config)
    other_process(lambda own: reported.append(int(own)) or own + 2)
    (tmp_path / "times.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        make_plan(config, mesh)
    assert reported == [0]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 1, 4), (3, 2, 1)], ids=str
)
def test_the_planner_counts_the_bytes_that_the_step_sums(sizes: tuple[int, int, int], zero: int) -> None:
    data, expert, tensor = sizes
    config = small_config(
        data, expert, tensor=tensor, num_shared_experts=1, model={"num_key_value_heads": 4, "num_attention_heads": 4}
    )
    config, mesh = dataclasses.replace(config, optimizer=OptimizerConfig(zero=zero)), mesh_of(config)
    summed = [sum(each.sent_bytes(mesh.shape)) for each in reductions_of(config, mesh, None)]
    planned = [sum(each.sent_bytes for each in owner) for owner in sums_of(config, config.mesh.sizes, None)]
    assert planned == pytest.approx(summed)


@pytest.mark.parametrize("policy", ["vanilla", "expert_pipeline", "unified"])
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 4, 2)], ids=str)
def test_the_planner_simulates_the_schedule_that_training_runs(policy: str, sizes: tuple[int, int, int]) -> None:
    data, expert, tensor = sizes
    parts = 1 if policy == "vanilla" else 2
    settings = GREEDY | {"policy": policy, "microbatches": parts, "link_gb_per_s": 0.1, "bucket_cap_mb": 0.01}
    config = small_config(data, expert, tensor=tensor, schedule=settings, batch_size=16)
    predicted = estimate(config, find_cluster("cpu-8")).timeline.schedule
    assert predicted == make_plan(config, mesh_of(config)).schedule
