"""Measured times of tasks in place of estimated ones."""

import re
from pathlib import Path

import pytest

from moe_jax.config import Config, ModelConfig, MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.plan.costs import rates_of, task_times
from moe_jax.plan.measured import MeasuredTimes, read_times, write_times
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import make_shape

_DENSE = {1: {"F": 0.6, "B": 0.5, "W": 0.4}}
_SECONDS = {
    "attend": {1: {"F": 0.3, "B": 0.4, "W": 0.2}},
    "expert": {1: {"F": 0.8, "B": 0.9, "W": 0.7}, 4: {"F": 1.1, "B": 1.2, "W": 0.7}},
}
_KINDS = ("dense", "moe", "moe")


def _task_s(times: MeasuredTimes, name: str, parts: int, weight_grad: str = "greedy") -> float:
    shape = make_shape("unified", _KINDS, parts, weight_grad=weight_grad, grad_reduce="end", reductions=(0,) * 5)
    action = Action.parse(name)
    return times.compute["dense" if _KINDS[action.block] == "dense" else action.op].seconds(action, shape)


def test_what_is_written_is_read_for_one_block(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_times(file, _SECONDS | {"dense": _DENSE}, 0.05)
    times = read_times(str(file), _KINDS)
    assert set(times.compute) == {"attend", "expert", "dense"}
    assert times.rest_s == 0.05
    assert _task_s(times, "F.attend.0.0", 1) == 0.6  # there is one such block
    assert [_task_s(times, f"{direction}.attend.1.0", 1) for direction in "FBW"] == [0.15, 0.2, 0.1]
    assert _task_s(times, "F.attend.1.0", 2) == pytest.approx(0.075)  # timed at one number of parts: no start-up time


def test_between_numbers_of_parts_times_follow_a_line_over_the_share_of_a_part(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_times(file, _SECONDS, 0.0)
    times = read_times(str(file), _KINDS)
    # forward 0.4 s whole and 0.1375 s for a quarter: 0.05 s to start and 0.35 s for what there is
    for parts in (1, 2, 4, 8):
        assert _task_s(times, "F.expert.1.0", parts) == pytest.approx(0.05 + 0.35 / parts)
    assert _task_s(times, "B.expert.1.0", 4, "inline") == pytest.approx((1.2 + 0.7) / 8)


def test_measured_ops_replace_estimated_ones(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_times(file, {"expert": _SECONDS["expert"]}, 0.05)
    model = ModelConfig(num_layers=3, moe=MoEConfig(num_experts=8, first_k_dense_replace=1))
    config = Config(model=model)
    rates = rates_of(config, "cpu", 2, 1, 2)
    found = read_times(str(file), model.block_kinds).compute
    estimated, measured = (task_times(config, "cpu", 64, 2, 1, [[0.0]] * 5, rates, each) for each in ({}, found))
    assert measured.compute == estimated.compute | found
    assert measured.transfer == estimated.transfer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory): name a file of measured times, or null"),
        ("{", "cannot be read (it is no JSON): name a file of measured times, or null"),
        ("[]", "is no file of measured times: it wants forward_s, backward_s, weight_s, seconds from 0 up, by number"),
        ('{"gate": {"1": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        ('{"expert": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
        ('{"expert": {}}', "is no file of measured times"),
        ('{"expert": {"0": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        ('{"expert": {"1": {"forward_s": 1, "backward_s": 1}}}', "is no file of measured times"),
        ('{"expert": {"1": {"forward_s": -1, "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        ('{"expert": {"1": {"forward_s": NaN, "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        ('{"expert": {"1": {"forward_s": true, "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        (
            '{"expert": {"1": {"forward_s": 1' + "0" * 400 + ', "backward_s": 1, "weight_s": 1}}}',
            "cannot be read (it has a whole number of 401 digits): name a file",
        ),
        ('{"expert": {"1": {"forward_s": "1", "backward_s": 1, "weight_s": 1}}}', "is no file of measured times"),
        ('{"rest_s": -1}', "is no file of measured times: its rest_s is to be seconds from 0 up"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "times.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"schedule.task_times={file} {message}")):
        read_times(str(file), _KINDS)
